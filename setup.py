"""Lists the packages of the wheel: ours, and the folder `conf`, which lies inside metalearn once it is installed."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[
        *find_namespace_packages(include=["metalearn*", "distributed*"]),
        *(name.replace("conf", "metalearn.conf", 1) for name in find_namespace_packages(include=["conf*"])),
    ],
    package_dir={"metalearn.conf": "conf"},
)
