"""Tables of which a test wants a few rows only."""


def keep(request, rows, *names):
    """Only some rows of a study; afterwards all of them again, in their order, which is that of its table."""
    whole = dict(rows)

    def restore():
        rows.clear()
        rows.update(whole)

    request.addfinalizer(restore)
    for name in set(rows) - set(names):
        del rows[name]
