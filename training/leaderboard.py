"""The command `python -m training.leaderboard`; see `training.evaluation.ranking`."""

from training.evaluation.ranking import main

if __name__ == "__main__":
    main()
