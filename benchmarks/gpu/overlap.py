"""Shows what a GPU does beside its collectives: the GPT of the examples, compiled for eight H100s.

    python benchmarks/gpu/overlap.py [--draw docs/images/overlap.svg] [--dump DIRECTORY] [--unroll 1]

It compiles a training step with jax_ring's calls on XLA's stream for collectives, with overlap=False, and with
`jax.lax`, prints how many matrix products XLA scheduled beside each collective, and draws the order. No program runs,
and no time is claimed. It needs no GPU, but the CUDA plugin of JAX's version (pip install --no-deps jax-cuda13-plugin
jax-cuda13-pjrt) and a CUDA toolkit, for ptxas.
"""

import argparse
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
# To import the model's pictures, the GPT and the reader of XLA's schedules.
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples"), str(ROOT / "tests" / "support")]
H100 = ROOT / "tests" / "gpu_topologies" / "h100.txtpb"
PROGRAMS = {  # whose collectives, and the options of the reduction of gradients and of XLA
    "jax_ring": ("ring", {}, {}),
    "jax_ring, overlap=False": ("ring", {"overlap": False}, {}),
    "jax.lax": ("lax", {}, {}),
    # By default XLA combines all-reduces up to 30 MB, and these wait for the very last gradient.
    "jax.lax, combined up to 1 MiB": ("lax", {}, {"xla_gpu_all_reduce_combine_threshold_bytes": 1 << 20}),
}
COLORS = {"matrix product": "#4477aa", "collective": "#ee6677", "other": "#bbbbbb"}


def compiled_step(arguments: argparse.Namespace, impl: str, reduction: dict, options: dict) -> str:
    """The scheduled HLO of a training step on eight GPUs."""
    import jax
    import jax.numpy as jnp
    import optax
    import train_gpt
    from jax.experimental import topologies
    from jax.sharding import PartitionSpec as P

    from jax_ring.training.wire import reduced_by

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=arguments.gpu.read_text(), topology="1x1x8"
    )  # fmt: skip
    mesh = topologies.make_mesh(topology, (8,), ("data",))

    def typed(tree, spec):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    shapes = {"width": arguments.width, "layers": arguments.layers, "context": arguments.context}
    params = jax.eval_shape(lambda: train_gpt.init_params(jax.random.key(0), **shapes))
    optimizer = optax.adam(1e-3)
    unroll = arguments.unroll or arguments.layers
    step = train_gpt.make_train_step(mesh, optimizer, jnp.bfloat16, unroll=unroll, wire="bfloat16", **reduction)
    state = train_gpt.TrainState(params=params, opt_state=jax.eval_shape(optimizer.init, params))
    tokens = jax.ShapeDtypeStruct((8 * arguments.rows, arguments.context + 1), jnp.int32)
    options = options | {"xla_gpu_enable_latency_hiding_scheduler": True}
    if arguments.dump:
        options |= {"xla_dump_to": str(arguments.dump), "xla_dump_hlo_as_text": True}
    with reduced_by(impl):
        lowered = step.lower(typed(state, P()), typed(tokens, P("data")))
    return lowered.compile(compiler_options=options).as_text()


def print_table(console, timelines: dict) -> None:
    from rich.table import Table
    from timeline import EXCHANGE, PRODUCT, products_beside

    table = Table("program", "collectives", "of them asynchronous", "matrix products", "beside each collective")
    for name, work in timelines.items():
        beside = products_beside(work)
        counts = [sum(each.kind == kind for each in work) for kind in (EXCHANGE, PRODUCT)]
        table.add_row(name, str(counts[0]), str(len(beside)), str(counts[1]), ", ".join(map(str, beside.values())))
    console.print(table)


def draw(timelines: dict, title: str):
    """A figure with a pair of rows for each program: what its streams do, in the order of the program."""
    from model.draw import pyplot
    from timeline import COLLECTIVE, EXCHANGE, MAIN, OTHER, PRODUCT

    plt = pyplot()
    figure, rows = plt.subplots(len(timelines), 1, figsize=(11, 1.3 * len(timelines) + 0.8), layout="constrained")
    for axes, (name, work) in zip(rows, timelines.items(), strict=True):
        # The position of each place in the order: other kernels are short and many.
        places, at = [], 0.0
        for each in work:
            places.append(at)
            if each.stream == MAIN:
                at += 0.15 if each.kind == OTHER else 1.0
        places.append(at)
        axes.broken_barh([(0, at)], (0.6, 0.8), facecolor=COLORS[OTHER])
        for kind, stream, row in ((PRODUCT, MAIN, 1), (EXCHANGE, MAIN, 1), (EXCHANGE, COLLECTIVE, 0)):
            shown = [each for each in work if (each.kind, each.stream) == (kind, stream)]
            ends = [each.begin + 1 if stream == MAIN else each.end for each in shown]
            spans = [
                (places[each.begin], places[end] - places[each.begin]) for each, end in zip(shown, ends, strict=True)
            ]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolor=COLORS[kind], edgecolor="white", linewidth=0.4)
        axes.set(xlim=(0, at), ylim=(-0.5, 1.5), title=name, yticks=[0, 1], yticklabels=["collectives", "main stream"])
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, COLORS, loc="outside lower center", ncols=len(COLORS), frameon=False)
    figure.suptitle(title, fontsize=9)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", type=pathlib.Path, default=H100, help="a GpuTargetConfigProto as text")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8, help="rows of the batch on each GPU (default: 8)")
    parser.add_argument("--unroll", type=int, help="layers in one iteration of the scan (default: all)")
    parser.add_argument("--draw", metavar="FILE", help="draw the order of each program")
    parser.add_argument("--dump", type=pathlib.Path, help="where XLA writes its dumps, with the CUDA graphs it records")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else the plugin needs all of NVIDIA's libraries
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    import jax
    import jaxlib
    from model.draw import save
    from rich.console import Console
    from timeline import timeline

    timelines = {name: timeline(compiled_step(arguments, *options)) for name, options in PROGRAMS.items()}
    console = Console()
    print_table(console, timelines)
    title = (
        f"A training step of a GPT of {arguments.layers} layers, compiled for 8 H100s by JAX {jax.__version__} (jaxlib "
        f"{jaxlib.__version__}): the order of each stream. The scale is no time."
    )
    if arguments.draw:
        save(draw(timelines, title), arguments.draw)


if __name__ == "__main__":
    main()
