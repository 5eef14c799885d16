"""Abseil's target names over the system's libraries."""

load("@rules_cc//cc:defs.bzl", "cc_library")

def system_absl(libraries, static_libraries = {}):
    """Declares targets of one Abseil package.

    Args:
      libraries: target name -> the shared libraries it links, without the prefix `absl_`.
      static_libraries: the same of static ones, whose symbols no shared library sees.
    """
    for name, links in libraries.items():
        cc_library(
            name = name,
            linkopts = ["-labsl_" + link for link in links],
            visibility = ["//visibility:public"],
        )
    for name, links in static_libraries.items():
        archives = ["libabsl_%s.a" % link for link in links]
        cc_library(
            name = name,
            linkopts = ["-l:" + archive for archive in archives] +
                       ["-Wl,--exclude-libs," + archive for archive in archives],
            visibility = ["//visibility:public"],
        )
