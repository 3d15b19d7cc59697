"""What a native module leaves to an attacker, by its ELF file. `python elf.py WHEEL ...` looks at those in wheels."""

import pathlib
import struct
import sys
import zipfile

KERNELS = "_cuda_kernels"
DYNAMIC, DYNSYM = 6, 11
UNDEFINED = 0
FLAGS, FLAGS_1, BIND_NOW, NOW_1 = 30, 0x6FFFFFFB, 0x8, 0x1
STACK, RELRO, EXECUTABLE = 0x6474E551, 0x6474E552, 0x1


class Module:
    """The parts of a 64-bit little-endian file that matter here."""

    def __init__(self, data: bytes):
        self._data = data
        assert data[:6] == b"\x7fELF\x02\x01"
        segments, sections = struct.unpack_from("<QQ", data, 32)
        segment_size, num_segments, section_size, num_sections = struct.unpack_from("<4H", data, 54)
        # Type and flags.
        self._segments = dict(struct.unpack_from("<II", data, segments + i * segment_size) for i in range(num_segments))
        # Name, type, flags, address, offset, size, link.
        self._sections = [
            struct.unpack_from("<IIQQQQI", data, sections + i * section_size) for i in range(num_sections)
        ]

    def _entries(self, of_type: int, form: str):
        """The entries of the sections of a type, each with the offset of its names."""
        for _, type_, _, _, offset, size, link in self._sections:
            if type_ == of_type:
                for entry in struct.iter_unpack(form, self._data[offset : offset + size]):
                    yield entry, self._sections[link][4]

    def _symbols(self, defined: bool) -> list[str]:
        names = []
        for (name, info, _, section, _, _), strings in self._entries(DYNSYM, "<IBBHQQ"):
            begin = strings + name
            if info >> 4 and (section != UNDEFINED) == defined:  # not local
                names.append(self._data[begin : self._data.index(b"\0", begin)].decode())
        return names

    @property
    def exports(self) -> list[str]:
        return self._symbols(defined=True)

    @property
    def imports(self) -> list[str]:
        return self._symbols(defined=False)

    @property
    def binds_at_once(self) -> bool:
        """Whether the table of functions is complete, and no longer written, once the module is loaded."""
        flags = {tag: value for (tag, value), _ in self._entries(DYNAMIC, "<QQ")}
        now = flags.get(FLAGS, 0) & BIND_NOW or flags.get(FLAGS_1, 0) & NOW_1
        return bool(now) and RELRO in self._segments

    @property
    def has_executable_stack(self) -> bool:
        return bool(self._segments.get(STACK, EXECUTABLE) & EXECUTABLE)


def faults(name: str, data: bytes) -> list[str]:
    """What is wrong with the module in a file of this name."""
    module, stem = Module(data), name.split("/")[-1].split(".")[0]
    found = []
    if module.exports != [f"PyInit_{stem}"]:
        found.append(f"it exports {module.exports}")
    if not module.binds_at_once:
        found.append("its table of functions stays writable")
    if module.has_executable_stack:
        found.append("its stack is executable")
    if stem != KERNELS and "__stack_chk_fail" not in module.imports:
        found.append("nothing guards its stack")
    return [f"{name}: {fault}" for fault in found]


def main(wheels: list[str]) -> int:
    found = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            modules = [name for name in archive.namelist() if name.endswith(".so")]
            assert modules, f"{wheel} has no native module"
            found += [f"{pathlib.Path(wheel).name}: {fault}" for m in modules for fault in faults(m, archive.read(m))]
    print("\n".join(found) or f"{len(wheels)} wheels, nothing found")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
