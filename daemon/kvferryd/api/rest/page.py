"""The status page."""

from kvferry import page

FILES = page.files(__package__)
