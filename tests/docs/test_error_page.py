"""docs/errors.md has an entry for each message of the sources, and no entry for one that is not there any more.

A message is a string of several words that is no documentation. What varies in it is "…", here and on the page. An
entry of the page is a heading that is code, so that a link and the search find it. Several in a row have the text below
the last. An entry matches a message if its constant parts are in it, in this order.
"""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/errors.md").read_text()
ENTRY = re.compile(r"^### `([^`\n]+)`$", re.MULTILINE)
LEAST_WORDS, LEAST_WORDS_OF_RAISE = 4, 2
LEAST_LETTERS = 10  # in the constant parts of an entry; fewer would be in too many messages

# ---- What is no message for users ------------------------------------------------------------------------------------

FILES_WITHOUT = {
    "what a native module's functions are": ["xla_cpu/module.cc", "cuda/module.cc", "cuda/kernels_module.cc"],
    "what custom calls hold, which jax_ring itself writes": [
        "attributes/trees.h", "attributes/xla_types.h", "xla_cpu/decode.cc", "launch/instance.cc",
    ],
}  # fmt: skip

STRINGS_WITHOUT = {  # by their beginnings
    "reports of `python -m jax_ring`, `explain` and `shares`": [
        "on in all threads", "CPU ranks are spread over them", "ranks stay where the system",
        "processes with equal names share memory", "hosts are told apart by", "groups of GPUs of one process",
        "do not use multicast memory", "fallback to XLA's collectives is", "the CUDA kernels are not loaded (",
        "the CUDA runtime finds no GPU (", "there is no NVIDIA driver (", "JAX has no such devices",
        "built-in thresholds for", "thresholds for algorithm='auto'", "Each rank sends, in bytes", "groups of one rank",
        "a collective of lax, not overridden", "jax_ring within hosts, XLA across", "rank     elements  bytes of state",
        "each rank allocates", "mesh position…mesh positions",
    ],
    "parts of messages that have entries": [
        "override_lax() in all threads", "channel … of XLA's partitioner", "a list of groups by",
        "a part of a mesh axis",
        "no fallback to XLA's collectives", "ranks may share a GPU", "it was told to end", "one of many other calls",
        "shards of a rank (", "state that init makes here", "scatter to the",
        "gather from the", "ring, for ", "start of the call", "a call of an earlier program",
        "ready to connect for", "fails calls at their", "looks for slow completions", "reports failures of GPU calls",
        "waits for the other processes of a group", "gives idle memory back", "keeps Python from launching",
        "jax_ring.launch: …", "in the device's program", "in a callback of the device's", "ranks that have exited",
        "or in the launch of", "; has not come to", "; has launched no", "; has completed what", "; its threads do not",
        "last call of jax_ring", "the last … steps, medians", "…, which XLA serves between hosts, waits",
        "not heard of yet", "silent, or cannot be reached", "with … processes (min_processes)",
        "--nnodes {}:{} and", "commit … and the one before", "Of its processes … and those", "The hosts that had them",
    ],
    "names, expressions to search with, and what is sent between processes": [
        "python -m jax_ring", "\\b(DEADLINE_EXCEEDED|", "Gloo|", "Gloo |",
        "Array has been deleted|", "^\\s+(?:ROOT )", "(?:custom_call_target=|", "dict[ir.Attribute, Call]",
        "over … in blocks\n", "this is the launcher of",
    ],
    "the help of the launcher": [
        "the wait before the first restart", "time that processes have", "time that the other processes have",
        "time that a process of an elastic job has", "time that the launchers of all hosts have",
        "with MIN:MAX, time that more than MIN", "with MIN:MAX, the others go on",
    ],
    "checks of what jax_ring itself passes on": [
        "prctl(PR_SET_PDEATHSIG) failed", "unknown request",
        "jax_ring: jax_ring.between_hosts needs", "replica groups: ", "partition … is in none of",
        ": the ranks have different numbers", "a group has between 1 and", "the group is not connected",
        "rank … is not of this process", "the memory handle has", ": the CUDA ordinal … is not below",
        "an operand of … elements in", "a call needs one result per operand", ": executed on the GPU with CUDA ordinal",
        "parts are converted, and blocks are apart", "a message of … bytes is cut off",
        "no rank of the group is in this process", "process … has ended",
        "there are … members and", "there are … groups, with", "there are … sources for",
        "the root, rank …", "groups of the sizes", "a member is in the groups twice", "the source …",
        "the thresholds of a group are", "only a reduce-scatter and an all-gather can",
        "only an all-to-all can have an operand for each", "a group whose ranks choose",
    ],
    "reasons that no supported JAX gives, in the docstring of hlo/collectives.py: read()": [
        "… has the unknown fields", "its groups are encoded in fields", "its groups … do not divide",
        "the parts of mesh axis … overlap", "its pairs … are no permutation", "its pairs … name other ranks",
        "it has … operands and … results", "it has the dimensions", "dimension … of … does not consist of",
        "its blocks along dimension … do not lie", "it has a layout before XLA", "its operand is …, and its result",
        "it is scheduled already", "not a message in protobuf's", "a field holds bytes where",
        "a field holds an integer",
    ],
    "a default that is always replaced": ["it is not there"],
}  # fmt: skip


def num_words(text: str) -> int:
    return len(re.findall(r"[A-Za-z]{2,}", text))


# ---- The messages of the Python sources ------------------------------------------------------------------------------


@functools.cache
def trees() -> dict[pathlib.Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.glob("jax_ring/**/*.py"))}


@functools.cache
def constants() -> dict[str, str]:
    """The names of environment variables, above all."""
    return {
        target.id: node.value.value
        for tree in trees().values() for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip


def text_of(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
        case ast.FormattedValue(value=ast.Name() | ast.Attribute() as name):
            return text_of(name)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return constants().get(name, "…")
    return "…"


def strings(node: ast.AST, least_words: int = LEAST_WORDS) -> Iterator[str]:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.keyword(arg="help" | "usage") | ast.Call(func=ast.Name(id="print")):
            return
        case ast.JoinedStr() | ast.Constant(value=str()) | ast.BinOp(op=ast.Add()):
            text = re.sub("%[sd]", "…", text_of(node))
            if num_words(text) >= least_words and " " in text:
                yield text
            inner = [part for part in ast.walk(node) if isinstance(part, ast.FormattedValue | ast.IfExp)]
            for part in inner:
                yield from (text for child in ast.iter_child_nodes(part) for text in strings(child))
        case _:
            least_words = LEAST_WORDS_OF_RAISE if isinstance(node, ast.Raise) else least_words
            for child in ast.iter_child_nodes(node):
                yield from strings(child, least_words)


# ---- The messages of the native sources ------------------------------------------------------------------------------

TOKEN = re.compile(r'"((?:[^"\\\n]|\\.)*)"|\'(?:[^\'\\]|\\.)\'|//[^\n]*|[;{}]|\S')
NO_MESSAGES = re.compile(r"(?:asm volatile|static_assert|m\.def|m\.doc)\(?.*?;\n|#(?:include|error)[^\n]*", re.DOTALL)


def native_strings(source: str) -> Iterator[str]:
    """The strings of each statement, joined. What stands between them is "…"."""
    text, was_string = "", False
    for token in TOKEN.finditer(NO_MESSAGES.sub("", source) + ";"):
        if token[1] is not None:
            text += ("" if was_string or not text else "…") + token[1].replace('\\"', '"').replace("\\n", "\n")
        elif token[0] in ";{}":
            if num_words(text) >= LEAST_WORDS and re.search(r"\w,? \w", text):
                yield text
            text = ""
        if not token[0].startswith("//"):
            was_string = token[1] is not None


@functools.cache  # not at import, which every worker does
def messages() -> dict[str, str]:
    """The messages of all sources, and the file of each."""
    found = {text: path for path, tree in trees().items() for text in strings(tree)}
    for part in ("attributes", "base", "collective", "cpu", "cuda", "device", "recorder", "shm", "xla_cpu"):
        # Not what CMake says, which is seen while the modules are built.
        folder = ROOT / "ffi" / part
        for path in sorted(set(folder.rglob("*.[hc]*")) - set(folder.rglob("*.cmake"))):
            found |= dict.fromkeys(native_strings(path.read_text()), path)
    return {text: "/".join(path.parts[-2:]) for text, path in found.items()}


# ---- Matching --------------------------------------------------------------------------------------------------------


def matches(entry: str, message: str) -> bool:
    end = 0
    for part in map(str.strip, entry.split("…")):
        if (start := message.find(part, end)) < 0:
            return False
        end = start + len(part)
    return True


NOT_ON_PAGE = tuple(text for texts in STRINGS_WITHOUT.values() for text in texts)
FILES_NOT_ON_PAGE = [file for files in FILES_WITHOUT.values() for file in files]
ENTRIES = ENTRY.findall(PAGE)


def messages_for_users() -> dict[str, str]:
    """Those that the page must have."""
    return {
        text: file for text, file in messages().items()
        if file not in FILES_NOT_ON_PAGE and not text.lstrip().startswith(NOT_ON_PAGE)
    }  # fmt: skip


def test_each_message_has_an_entry():
    messages = messages_for_users().items()
    missing = [f"{file}: {text}" for text, file in messages if not any(matches(each, text) for each in ENTRIES)]
    assert not missing, "docs/errors.md has no entry for\n" + "\n".join(missing)


def test_each_entry_is_a_message():
    messages = messages_for_users()
    left_over = [entry for entry in ENTRIES if not any(matches(entry, text) for text in messages)]
    assert not left_over, "docs/errors.md has entries for what no source says:\n" + "\n".join(left_over)


def test_entries_are_distinct_and_long_enough():
    assert len(ENTRIES) > 300
    assert len(set(ENTRIES)) == len(ENTRIES)
    assert not [entry for entry in ENTRIES if sum(map(str.isalpha, entry)) < LEAST_LETTERS]


def test_each_entry_has_a_text():
    """Below it, or below the last of those in a row; and all headings of that level are entries."""
    blocks = [block for block in PAGE.split("\n\n") if block]
    for block, below in zip(blocks, [*blocks[1:], "## the end"], strict=True):
        assert not (block.startswith("### ") and below.startswith("## ")), block
    assert len(re.findall("^### ", PAGE, re.MULTILINE)) == len(ENTRIES)


def test_what_is_left_out_is_there():
    assert not [text for text in NOT_ON_PAGE if not any(each.lstrip().startswith(text) for each in messages())]
    assert set(FILES_NOT_ON_PAGE) <= {*messages().values()}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise ValueError(f"{name}: got {x!r} " "here")', ["…: got … here"]),
        ('raise ValueError(text + ": too few" if x else "too many")', ["…: too few", "too many"]),
        ("log(f'failed {cause or \"that it was told to end\"}')", ["that it was told to end"]),
        ('log("%s are not there after %d s", a, b)', ["… are not there after … s"]),
        ('"""A text that documents something."""', []),
        ('x = "two words"', []),
    ],
)
def test_strings_of_python(source, found):
    assert [*strings(ast.parse(source))] == found


def test_native_strings():
    source = """
      // "a comment of more than four words"
      throw std::runtime_error(
          "one text in " "two literals, then " + std::to_string(x) +  // why
          " and an \\"end\\"");
      static_assert(a, "no user ever sees this one");
    """
    assert [*native_strings(source)] == ['one text in two literals, then … and an "end"']


@pytest.mark.parametrize(
    ("entry", "message", "expected"),
    [
        ("…: got …, not …", "x: got …, not this", True),
        ("…: got …, not …", "not this, x: got …", False),
        ("got (…)", "got (1)", True),
        ("got it", "got … it", False),
    ],
)
def test_matching(entry, message, expected):
    assert matches(entry, message) == expected
