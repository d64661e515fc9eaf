"""The programs beside a training run. Its modules say which extra to install where one of their packages is missing."""

from exgrpo.extras import imported_under

imported_under(__name__, "exgrpo[train]")
