"""The command `python -m training.evaluate`; see `training.evaluation.comparison`."""

from training.evaluation.comparison import main

if __name__ == "__main__":
    main()
