"""Package metadata. Tool settings are in pyproject.toml, the environment is made by scripts/setup.sh."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"
PACKAGE = (HERE / "pretraining" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "(.+)"$', PACKAGE, re.MULTILINE)
assert VERSION is not None

setup(
    name="pretraining",
    version=VERSION[1],
    description="Llama pretraining with FSDP2: elastic exact data, the same start everywhere, nothing lost",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    package_dir={"": "."},  # an editable install then wins over a clone's folder of this name, a namespace package
    packages=find_packages(include=["pretraining", "pretraining.*"]),
    package_data={"pretraining": ["py.typed", "config/recipes/*.yaml"]},
    install_requires=[
        "annotated-types>=0.7",
        "torch>=2.11,<2.16",
        "torchdata>=0.11",
        "pyarrow>=17",
        "fire>=0.7",
        "numpy>=2.0",
        "tensorboard>=2.17",
        "pyyaml>=6.0,!=6.0.4",
        "rich>=13.7",
        "tokenizers>=0.20",
        "jinja2>=3.1.6",  # chat templates; earlier versions let templates out of the sandbox
        "matplotlib>=3.9",  # the curves of `pretrain report`
    ],
    extras_require={
        # A faster BPE for `pretrain prepare`. scripts/setup.sh installs it if there is a wheel for the machine.
        "fast": ["fastokens>=0.3.5,<0.4"],
        # Reading Hugging Face datasets in `pretrain prepare`.
        "hf": ["datasets>=4.0"],
        # `pretrain export --format=gguf`.
        "gguf": ["gguf>=0.17"],
        "report": [],  # earlier versions had matplotlib here
        # Float8 training. 0.18 is for all of these versions of torch, and avoids kernels that gave NaN once compiled.
        "float8": ["torchao>=0.18,<0.19"],
        # Benchmark tasks (--eval_tasks).
        "tasks": ["lm-eval>=0.4.13,<0.5"],
        # Trackers.
        "wandb": ["wandb>=0.21"],
        "mlflow": ["mlflow>=3.0"],
        # The documentation as a site (mkdocs.yml). Pinned: a theme may change what it fetches, and how it looks.
        "docs": ["mkdocs==1.6.1", "mkdocs-material==9.8.1", "mkdocstrings==1.0.8", "mkdocstrings-python==2.0.11"],
        # transformers and accelerate are what the model and the speed are compared with; training needs neither.
        "dev": [
            "accelerate>=1.1",
            "datasets>=4.0",
            "flask>=3.0",
            "flask-cors>=4.0",
            "hypothesis>=6.100",
            "lm-eval>=0.4.13,<0.5",
            "moto[s3]>=5.0",
            "mypy>=1.15",
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.12",
            "safetensors>=0.4.5",
            "torchao>=0.18,<0.19",
            "transformers>=5.0",
            "types-PyYAML",
        ],
        # Foreign tools that slow tests try the results in.
        # (Not mlflow, which wants an older pyarrow: its slow tests are skipped without it.)
        "slow": ["gguf>=0.17", "kubeflow-trainer-api>=2.0", "lm-eval[hf]>=0.4.9", "wandb>=0.21", "xllamacpp"],
    },
    entry_points={"console_scripts": ["pretrain = pretraining.cli:run_console_script"]},
)
