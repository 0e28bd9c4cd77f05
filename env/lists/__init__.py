"""Which jobs run now? List schedules, and how they are followed, edit by edit."""
