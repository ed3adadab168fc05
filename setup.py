"""The one thing that pyproject.toml cannot say: a library in C that is built if there is a compiler, else left out."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/forewarn/measure/engine/native")

setup(
    ext_modules=[
        Extension(
            "forewarn.measure.engine.native._library",
            sources=sorted(str(path) for path in NATIVE.glob("*.c")),
            depends=sorted(str(path) for path in NATIVE.glob("*.h")),
            # Every path adds in the same order; contraction into fused operations would give other numbers.
            extra_compile_args=["-std=c11", "-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno",
                                "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
            py_limited_api=True,  # it knows nothing of Python: one wheel is for every version
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)  # fmt: skip
