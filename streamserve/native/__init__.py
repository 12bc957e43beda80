"""Native kernels in C++ behind a plain C ABI: what a CPU computes faster than torch does.

`src/` is compiled once per instruction set (`levels.py`), on first use or into the wheel (`build.py`), and called
through ctypes with addresses and sizes as plain numbers (`library.py`). Knows no torch and no model: callers are in
`engine/model/`. Everything works without it, slower.
"""
