"""The command `python -m training.study`; see `training.study.study_run`."""

from training.study.study_run import main

if __name__ == "__main__":
    main()
