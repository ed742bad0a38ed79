"""An extension of griffe: the sections "Call arguments:" and "Reference:" of docstrings, which griffe does not know."""

import re

import griffe

SECTION = re.compile(r"^(Call arguments|Reference):\n((?:    .*\n?|\n)+)", re.M)
ARGUMENT = re.compile(r"^([\w, ]+): (.*)", re.S)


class Sections(griffe.Extension):
    """Makes a list of call arguments, and a paragraph of references."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub(_markdown, obj.docstring.value)


def _markdown(match):
    title, body = match[1], re.sub(r"^    ", "", match[2], flags=re.M).strip()
    if title == "Reference":
        return f"**Reference:** {body}\n\n"
    items = []
    for item in re.split(r"\n(?! )", body):
        names, text = ARGUMENT.match(re.sub(r"\s+", " ", item)).groups()
        items.append(f"- {', '.join(f'**`{name}`**' for name in names.split(', '))} – {text}")
    return "**Call arguments:**\n\n" + "\n".join(items) + "\n\n"
