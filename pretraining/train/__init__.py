"""Training run: planned (`plan`), built (`build`), stepped (`step`), looped (`loop`)."""
