"""The command `python -m deploy.report`; see `deploy.records.run_report`."""

from deploy.records.run_report import main

if __name__ == "__main__":
    main()
