"""The command `python -m training.factorial`; see `training.analysis.effects`."""

from training.analysis.effects import main

if __name__ == "__main__":
    main()
