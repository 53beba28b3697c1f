"""The gallery: one page that shows a folder of videos and what each cost, without network and without a server."""

from chai_cli.gallery.page import POSTERS, Gallery, build

__all__ = ["POSTERS", "Gallery", "build"]
