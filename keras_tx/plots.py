"""Pictures of trainings and attention."""
