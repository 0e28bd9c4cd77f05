"""The command `python -m deploy.view`; see `deploy.records.live_view`."""

from deploy.records.live_view import main

if __name__ == "__main__":
    main()
