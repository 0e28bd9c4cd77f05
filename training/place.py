"""The command `python -m training.place`; see `training.placement.placing`."""

from training.placement.placing import main

if __name__ == "__main__":
    main()
