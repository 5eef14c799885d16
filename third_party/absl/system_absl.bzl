"""Abseil's target names over the system's shared libraries."""

load("@rules_cc//cc:defs.bzl", "cc_library")

def system_absl(libraries):
    """Declares targets of one Abseil package.

    Args:
      libraries: target name -> the shared libraries it links, without the prefix `absl_`.
    """
    for name, links in libraries.items():
        cc_library(
            name = name,
            linkopts = ["-labsl_" + link for link in links],
            visibility = ["//visibility:public"],
        )
