"""Sound files turned into damaged ones, in ways that hypothesis chooses and can make simpler."""

import copy
import json
import re
import struct

from hypothesis import strategies as st

_TOKEN = re.compile(rb'-?\d[\d.eE+-]*|"[^"\n]*"|null|true|false|[^\s,|#\t]+')
_VALUES = (
    b"null", b"true", b"0", b"-1", b"1", b"3", b"2.5", b"65535", b"65537", b"1e9", b"1e-9", b"1e999", b"NaN",
    b"-Infinity", b"9" * 30, b"9" * 5000, b'""', b'"x"', b'"\\ud800"', b'"../../x"', b'"\\u0000"', b"[]", b"{}",
    b"[[]]", b'{"a": 1}', b"\xff\xfe", b"\0", b"\t", b"\n", b",", b'"', b"x" * 3000,
    "\u202e٣".encode(), b"/dev/zero", b"[" * 2000,
)  # fmt: skip
_NUMBERS = (0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)

edits = st.lists(
    st.tuples(
        st.sampled_from(("token", "byte", "number", "cut", "drop", "double")),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=3,
)
"""What is done to a file: how, where (as a share of its length), and with what."""


def mutated(data, changes):
    """The bytes of a file after some edits."""
    for kind, share, choice in changes:
        data = _EDITS[kind](data, share, choice)
    return data


def _token(data, share, choice):
    """A number, a word or a text in quotation marks becomes something else."""
    found = list(_TOKEN.finditer(data[:100_000]))
    if not found:
        return _byte(data, share, choice)
    token = found[int(share * len(found))]
    return data[: token.start()] + _VALUES[choice % len(_VALUES)] + data[token.end() :]


def _byte(data, share, choice):
    place = int(share * len(data))
    return data[:place] + bytes([choice % 256]) + data[place + 1 :]


def _number(data, share, choice):
    """Some bytes become a number of a header, whichever way round."""
    width, order = (1, 2, 4, 8)[choice % 4], "<>"[choice // 4 % 2]
    value = _NUMBERS[choice // 8 % len(_NUMBERS)] % 2 ** (8 * width)
    place = int(share * min(len(data), 600)) // width * width
    return data[:place] + struct.pack(f"{order}{' BH I   Q'[width]}", value) + data[place + width :]


def _cut(data, share, choice):
    return data[: int(share * len(data))]


def _drop(data, share, choice):
    place = int(share * len(data))
    return data[:place] + data[place + 1 + choice % 64 :]


def _double(data, share, choice):
    place = int(share * len(data))
    return data[:place] + data[place : place + 1 + choice % 512] + data[place:]


_EDITS = {"token": _token, "byte": _byte, "number": _number, "cut": _cut, "drop": _drop, "double": _double}


def safetensors_header(data, changes):
    """Only the header is changed, and its length said as it is."""
    size = struct.unpack("<Q", data[:8])[0]
    head = mutated(data[8 : 8 + size], changes)
    return struct.pack("<Q", len(head)) + head + data[8 + size :]


def tar_headers(data, changes):
    """After the edits, headers have the right checksums again."""
    changed = bytearray(mutated(data, changes))
    for place in range(0, len(changed) - 511, 512):
        if changed[place + 257 : place + 262] == b"ustar":
            changed[place + 148 : place + 156] = b" " * 8
            changed[place + 148 : place + 156] = f"{sum(changed[place : place + 512]):06o}\0 ".encode()
    return bytes(changed)


def json_values(data, changes):
    """It stays JSON: values anywhere in it are exchanged, removed or doubled."""
    content = json.loads(data)
    for kind, share, choice in changes:
        places = list(_places(content))
        holder, key = places[int(share * len(places))]
        if kind == "drop":
            del holder[key]
        elif kind == "double" and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[key] = copy.deepcopy(_JSON[choice % len(_JSON)])
        if not content:
            break
    return json.dumps(content).encode()


_JSON = (
    None, True, 0, -1, 1, 3, 2.5, 65535, 10**9, 10**30, 1e308, 1e-9, float("nan"), float("inf"), "", "x", "\ud800",
    "\0", "../../x", "a" * 3000, [], {}, [[]], [1, 2], {"a": 1}, ["x"],
)  # fmt: skip


def _places(content):
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield content, key
        yield from _places(value)
