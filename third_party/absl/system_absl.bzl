"""Abseil's package names over the system's shared libraries."""

load("@rules_cc//cc:defs.bzl", "cc_library")

def system_absl(libraries, headers = []):
    """Declares targets of one Abseil package.

    Args:
      libraries: target name -> the shared libraries it links, without the prefix `absl_`.
      headers: names of targets that are headers only.
    """
    for name, links in libraries.items():
        cc_library(
            name = name,
            linkopts = ["-labsl_" + link for link in links],
            visibility = ["//visibility:public"],
        )
    for name in headers:
        cc_library(
            name = name,
            visibility = ["//visibility:public"],
        )
