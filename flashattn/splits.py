"""Into how many parts to split the keys of a decode step: plain arithmetic, for the launcher and the book's figure."""

import functools

MOST_SPLITS = 128
# What a program costs beside its tiles, and what the merging kernel costs, in the time of a tile.
START_TILES, MERGE_TILES = 1, 2


def waves(n_programs, n_tiles, n_splits, at_once):
    """Return (waves, tiles' times of each): programs start in waves of at_once, and a wave lasts as long as a program.

    Args:
        n_programs: programs without a split.
        n_tiles: the most tiles of keys that any of them has.
        n_splits: parts of the keys, a program each.
        at_once: how many programs the device runs side by side.
    """
    return -(-n_programs * n_splits // at_once), -(-n_tiles // n_splits) + START_TILES


@functools.lru_cache(maxsize=4096)  # some 100 µs to choose, 0.1 µs to remember
def choose_splits(n_programs, n_tiles, at_once):
    """Return the fewest splits that should take at most a tenth more than the least time.

    A wave that is not full takes less than ``waves`` says, since the programs share the memory's bandwidth: hence the
    tenth. The arguments are those of ``waves``.
    """

    def time(n_splits):
        n_waves, tiles = waves(n_programs, n_tiles, n_splits, at_once)
        return n_waves * tiles + (MERGE_TILES if n_splits > 1 else 0)

    choices = range(1, max(1, min(n_tiles, MOST_SPLITS)) + 1)
    least = min(map(time, choices))
    return next(n_splits for n_splits in choices if time(n_splits) <= 1.1 * least)
