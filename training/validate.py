"""The command `python -m training.validate`; see `training.calibration.validation`."""

from training.calibration.validation import main

if __name__ == "__main__":
    main()
