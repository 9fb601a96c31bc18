"""The run: built from its parts (`build`), stepped (`step`), looped (`loop`)."""
