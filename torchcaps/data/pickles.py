"""Pickles read without unpickling: plain values and numpy arrays are followed, all else is refused."""

from __future__ import annotations

import pickletools
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from torchcaps.data.errors import DataError

AGAIN = "delete it and fetch it again"


class _Name(str): ...


class _DType:
    def __init__(self, code: str):
        self.code, self.order = code, "|"


class _Array:
    value: np.ndarray | None = None


ADMITTED = {
    **{f"{numpy}.multiarray _reconstruct": "array" for numpy in ("numpy.core", "numpy._core")},
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",
}
NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
STRINGS = {"SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"}
CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Any] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}


def parse_pickle(content: bytes, path: Path | str) -> dict[str, Any]:
    """A pickled dictionary of plain values and numpy arrays, followed on paper: no name in it is ever looked up.

    Covers what Python 2 wrote (the official files) and protocols 2 to 4 of Python 3; anything else is refused, in a
    sentence with the name of its file, `path`.
    """
    try:
        result = _follow(content, path)
        if not isinstance(result, dict):
            raise DataError(f"{path} holds no dictionary: {AGAIN}")
        return {_text(key): value.value if isinstance(value, _Array) else value for key, value in result.items()}
    except DataError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error):
        raise DataError(f"{path} is cut short or no python batch: {AGAIN}") from None


def _follow(content: bytes, path: Path | str) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        at = marks.pop()
        values = stack[at:]
        del stack[at:]
        return values

    opcode: Any
    argument: Any
    for opcode, argument, _ in pickletools.genops(content):
        word = opcode.name
        if word in ("PROTO", "FRAME"):
            continue
        if word in NUMBERS or word in STRINGS:
            stack.append(argument)
        elif word in CONSTANTS:
            stack.append(CONSTANTS[word])
        elif word in EMPTY:
            stack.append(EMPTY[word]())
        elif word == "MARK":
            marks.append(len(stack))
        elif word == "TUPLE":
            stack.append(tuple(since_mark()))
        elif word in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack[-int(word[-1]) :] = [tuple(stack[-int(word[-1]) :])]
        elif word == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif word == "APPENDS":
            values = since_mark()
            stack[-1].extend(values)
        elif word in ("SETITEM", "SETITEMS"):
            values = since_mark() if word == "SETITEMS" else [stack.pop(-2), stack.pop()]
            stack[-1].update(zip(values[::2], values[1::2], strict=True))
        elif word in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if word == "MEMOIZE" else argument] = stack[-1]
        elif word in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif word in ("GLOBAL", "STACK_GLOBAL"):
            name = argument if word == "GLOBAL" else f"{stack.pop(-2)} {stack.pop()}"
            if name not in ADMITTED:
                raise DataError(f"{path} asks for {name.replace(' ', '.')}, which no data file needs: do not use it")
            stack.append(_Name(ADMITTED[name]))
        elif word == "REDUCE":
            arguments = stack.pop()
            stack.append(_made(stack.pop(), arguments))
        elif word == "BUILD":
            state = stack.pop()
            _fill(stack[-1], state)
        elif word == "STOP":
            return stack.pop()
        else:
            raise DataError(f"{path} uses {word}, which no data file needs: do not use it")


def _made(name: Any, arguments: Any) -> Any:
    """What calling one of the admitted names would have given."""
    if not isinstance(name, _Name):
        raise TypeError(name)
    if name == "array":
        return _Array()
    if name == "dtype" and re.fullmatch("[biuf][1248]", _text(arguments[0])):
        return _DType(_text(arguments[0]))
    if name == "encode" and arguments[1] == "latin1":
        return arguments[0].encode("latin-1")
    raise ValueError(name)


def _fill(made: Any, state: Any) -> None:
    if isinstance(made, _DType):
        made.order = _text(state[1])
    elif isinstance(made, _Array):
        _, shape, dtype, columns_first, raw = state
        raw = raw.encode("latin-1") if isinstance(raw, str) else raw
        values = np.frombuffer(bytearray(raw), np.dtype(dtype.order + dtype.code))
        made.value = values.reshape(shape, order="F" if columns_first else "C")
    else:
        raise TypeError(made)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
