"""The command `python -m training.calibrate`; see `training.calibration.year_profile`."""

from training.calibration.year_profile import main

if __name__ == "__main__":
    main()
