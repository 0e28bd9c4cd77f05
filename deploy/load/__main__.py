"""The command `python -m deploy.load`; see `deploy.load.dynamic_load`."""

from deploy.load.dynamic_load import main

if __name__ == "__main__":
    main()
