"""Templates of the report and of model cards."""

import functools

import jinja2


@functools.cache
def template(name: str) -> jinja2.Template:
    """Reads a template below this folder; in HTML every text is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("service", "output"),
        autoescape=name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"plain": plain, "inline": _inline, "cell": lambda text: plain(_inline(text))}
    return environment.get_template(name)


def plain(text: object) -> str:
    """Text that stays in its line, and in its cell of a table in Markdown."""
    return " ".join(str(text).split()).replace("|", "\\|")


def _inline(text: str) -> str:
    """Markdown in which names of users cannot open a tag; stars and underscores stay readable."""
    return " ".join(text.split()).replace("<", "&lt;").replace(" *", " \\*")
