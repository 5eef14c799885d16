"""The C++ rules of this project: warnings are errors here, and only here (LibTorch's headers are system headers)."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")
load("//tools/build:precompiled_header.bzl", "precompiled_header")

_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    # Fields left out of a designated initialiser have the default that the struct gives them.
    "-Wno-missing-field-initializers",
    # Files that are compiled together (below) seem to be headers.
    "-Wno-subobject-linkage",
]

# What the shared library exports is marked (device_mesh/api.h).
_HIDDEN = ["-fvisibility=hidden"]

# Tests call for errors and effects, and drop what comes back.
_TEST_ONLY = ["-Wno-unused-result"]

# LibTorch is a release build, and the layout of some of its classes depends on that.
_RELEASE = ["-DNDEBUG"]

# One configuration for training and tests: what is run is optimised, and checks that cost are
# switched on by tests (fsdp::set_debug_options).
_OPTIMISED = ["-O2"] + _RELEASE

_LIBTORCH = "@libtorch//:libtorch"

# Those of tests/ and of everything else; each is compiled with the options of those that it serves.
_PRECOMPILED = {
    "library_headers": _OPTIMISED + _HIDDEN,
    "test_headers": _RELEASE + ["-O0"],
}

def precompiled_headers():
    """The targets of tools/build that _with_precompiled names."""
    for name, copts in _PRECOMPILED.items():
        precompiled_header(
            name = name,
            copts = copts,
            header = name + ".h",
            visibility = ["//visibility:public"],
            deps = [_LIBTORCH],
        )

def _with_precompiled(name, deps):
    """What to add to the options and dependencies of a target that has `deps`, so that it starts with precompiled header `name`:
    nothing where it does without LibTorch, or where the configuration asks what each file includes."""
    if name == None or _LIBTORCH not in deps:
        return [], []
    none = {"//tools/build:alone": [], "//tools/build:every_header": []}
    path = "tools/build/precompiled/%s.h" % name
    return (
        select(dict(none, **{"//conditions:default": ["-include", path]})),
        select(dict(none, **{"//conditions:default": ["//tools/build:" + name]})),
    )

def _one_source(source, files, testonly = False):
    """`files` behind one another. Messages and debuggers name the files."""
    native.genrule(
        name = source.replace("/", "_"),
        testonly = testonly,
        srcs = files,
        outs = [source],
        cmd = "for f in $(SRCS); do echo \"#line 1 \\\"$$f\\\"\"; cat $$f; done > $@",
    )
    return source

def _one_source_per_folder(name, srcs, testonly, together):
    """The files of each folder behind one another, and of the folders of a list in `together`: LibTorch's headers take five
    times as long to compile as what a file of ours says. What is in an anonymous namespace must differ within them."""
    first = {folder: folders[0] for folders in together for folder in folders}
    sources = {}
    for src in srcs:
        folder = src.rpartition("/")[0]
        sources.setdefault(first.get(folder, folder), []).append(src)
    return [
        _one_source("%s_sources/%s.cc" % (name, folder or native.package_name()), files, testonly)
        for folder, files in sources.items()
    ]

def fsdp_cc_library(name, srcs = [], copts = [], deps = [], testonly = False, together = [], **kwargs):
    """A library. It is always linked whole: its dispatcher kernels are registered by static initialisers. Its headers, as
    files, are name_headers. Each list in `together` has folders that are compiled as one."""
    native.filegroup(
        name = name + "_headers",
        testonly = testonly,
        srcs = kwargs.get("hdrs", []),
        visibility = kwargs.get("visibility"),
    )
    with_headers, headers = _with_precompiled("library_headers", deps if srcs else [])
    cc_library(
        name = name,
        testonly = testonly,
        srcs = select({
            "//tools/build:alone": srcs,
            "//conditions:default": _one_source_per_folder(name, srcs, testonly, together),
        }),
        alwayslink = True,
        copts = _WARNINGS + _OPTIMISED + _HIDDEN + (_TEST_ONLY if testonly else []) + copts + with_headers,
        deps = deps + headers,
        linkstatic = True,
        **kwargs
    )

def fsdp_cc_binary(name, srcs, hdrs = [], copts = [], precompiled = None, deps = [], **kwargs):
    """A program, compiled as one source. One that starts with the `precompiled` header of tests is compiled as quickly as they
    are, not to be fast."""
    with_headers, headers = _with_precompiled(precompiled, deps)
    cc_binary(
        name = name,
        srcs = [srcs[0] if len(srcs) == 1 else _one_source("%s_sources/%s.cc" % (name, name), srcs)] + hdrs,
        copts = _WARNINGS + _OPTIMISED + _PRECOMPILED.get(precompiled, []) + copts + with_headers,
        deps = deps + headers,
        **kwargs
    )

def _links_impl(ctx):
    links = [ctx.actions.declare_file(name) for name in [ctx.attr.soname, ctx.attr.name]]
    for link in links:
        ctx.actions.symlink(output = link, target_file = ctx.file.library)
    return [DefaultInfo(files = depset(links + [ctx.file.library]))]

_links = rule(
    implementation = _links_impl,
    attrs = {
        "library": attr.label(allow_single_file = True),
        "soname": attr.string(),
    },
)

def fsdp_cc_shared_library(name, version, deps, **kwargs):
    """A shared library that holds all of `deps`, with the registrations of their kernels.

    It is name.version, with the links that linkers and programs look for: name and name.major.minor, which is its soname,
    since before 1.0 every minor version may change the interface."""
    soname = "%s.%s" % (name, version.rpartition(".")[0])
    library = "%s.%s" % (name, version)
    cc_binary(
        name = library,
        linkopts = ["-Wl,-soname," + soname],
        linkshared = True,
        deps = deps,
        **kwargs
    )
    _links(
        name = name,
        library = library,
        soname = soname,
    )

def _compiled_by_folder(name, srcs):
    """One source per folder of `srcs`, which includes that folder's files: LibTorch's headers take ten times as long to
    compile as what a file of tests says."""
    folders = {}
    for src in srcs:
        folders.setdefault(src.rpartition("/")[0], []).append(src)
    together = []
    for folder, files in folders.items():
        source = "%s_sources/%s.cc" % (name, folder)
        includes = ['#include "%s/%s"' % (native.package_name(), file) for file in files]
        native.genrule(
            name = source.replace("/", "_"),
            testonly = True,
            outs = [source],
            cmd = "cat > $@ <<'END'\n%s\nEND" % "\n".join(includes),
        )
        together.append(source)
    return together

def fsdp_cc_test(name, srcs, copts = [], deps = [], size = "large", **kwargs):
    """A GoogleTest program. Its main function is in //tests:support."""
    sources = [src for src in srcs if src.endswith(".cc")]
    cc_library(
        name = name + "_files",
        testonly = True,
        textual_hdrs = sources,
    )
    with_headers, headers = _with_precompiled("test_headers", deps)
    cc_test(
        name = name,
        size = size,
        srcs = [src for src in srcs if src not in sources] + _compiled_by_folder(name, sources),
        copts = _WARNINGS + _RELEASE + _TEST_ONLY + ["-O0"] + copts + with_headers,
        linkstatic = True,
        deps = deps + [name + "_files", "@googletest//:gtest"] + headers,
        **kwargs
    )
