"""The serving benchmark: its loads, how they run, what is written of them. See `qengine bench`."""
