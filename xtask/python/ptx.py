"""Compiles a kernel to PTX: `ptx.py FILE.cu FILE.ptx [--check]`.

With --check nothing is written: the PTX must be what the file holds. Either way ptxas translates it
for four generations of GPUs, and its registers and spills are printed.
"""

import ctypes
import pathlib
import re
import subprocess
import sys

ARCHITECTURES = ["sm_70", "sm_80", "sm_86", "sm_90"]


def compiled(source):
    library = next(pathlib.Path(sys.prefix).rglob("libnvrtc.so.*"))
    nvrtc = ctypes.CDLL(str(library))

    def call(name, *arguments):
        if status := getattr(nvrtc, name)(*arguments):
            raise SystemExit(f"{name} failed with {status}\n{text('ProgramLog') if name == 'nvrtcCompileProgram' else ''}")

    def text(of):
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{of}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{of}")(program, buffer)
        return buffer.value.decode()

    program = ctypes.c_void_p()
    call("nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    options = (ctypes.c_char_p * 2)(b"--gpu-architecture=compute_70", b"--std=c++17")
    call("nvrtcCompileProgram", program, len(options), options)
    # Constants of NVRTC's own headers, which nothing uses.
    lines = text("PTX").splitlines()
    return "\n".join(line for line in lines if "_INTERNAL_" not in line and line.strip() != "// .globl") + "\n"


def main():
    source, target = map(pathlib.Path, sys.argv[1:3])
    ptx = compiled(source)
    if "--check" in sys.argv:
        if target.read_text() != ptx:
            raise SystemExit(f"{target} is not what {source} compiles to: cargo xtask ptx")
    else:
        target.write_text(ptx)
    ptxas = next(pathlib.Path(sys.prefix).rglob("bin/ptxas"))
    ptxas.chmod(0o755)
    for architecture in ARCHITECTURES:
        command = [str(ptxas), "-v", f"-arch={architecture}", str(target), "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers = re.search(r"Used (\d+) registers", said)[1]
        spills = re.search(r"(\d+) bytes spill stores", said)[1]
        print(f"{architecture}: {registers} registers, {spills} bytes spilled")
    print(f"{len(ARCHITECTURES)} passed, 0 failed, 0 skipped")


if __name__ == "__main__":
    main()
