"""Programs other than training. Importing one without its packages raises an error that names the extra to install."""

from exgrpo.extras import imported_under

imported_under(__name__, "exgrpo[train]")
