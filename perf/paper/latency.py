"""The sections that show what other benchmarks measure: latencies, and what the paper did not measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perf import cancellation, faults, node, sandboxes, tools, trace
from perf.dapo_work import PAPER_ACTION_S, PAPER_TMUX_ACTION_S
from perf.paper.from_reports import PaperValue, Shown, finding_of_report

if TYPE_CHECKING:
    from perf.findings import Finding
    from perf.harness import Options

__all__ = [
    "measure_cancellation",
    "measure_faults",
    "measure_node",
    "measure_sandboxes",
    "measure_shell",
    "measure_tools",
]


async def measure_shell(options: Options) -> Finding:
    """Run the recorded trace through our shell, a bare pty and the peers that are installed."""
    return finding_of_report(
        await trace.benchmark(options),
        title="A shell action of a recorded agent, with its command's own work",
        shown=[
            Shown("trace.pty", "bare pty", "floor"),
            Shown("trace.ours", "our shell, through its daemon"),
            Shown("trace.swerex", "SWE-ReX", "peer"),
            Shown("trace.tmux", "OpenHands' terminal on tmux", "peer"),
        ],
        paper=[
            PaperValue("the paper's efficient bash, mean", 1e3 * PAPER_ACTION_S),
            PaperValue("the paper's tmux, mean", 1e3 * PAPER_TMUX_ACTION_S),
        ],
        metrics={
            "trace.tmux_over_ours": "tmux's overhead over ours",
            "trace.swerex_over_ours": "SWE-ReX' overhead over ours",
            "trace.tmux_over_ours_whole": "tmux' time over ours, commands' own work included (the paper: 1.86)",
        },
        caption=[
            "What differs: the paper's figures are means over its own agents' commands on its own machines, and ours "
            "are of a recorded trace here, so only the ratios compare."
        ],
    )


async def measure_tools(options: Options) -> Finding:
    """Time commands, cells and calls through the daemon, beside the same without it."""
    return finding_of_report(
        await tools.benchmark(options),
        title="Tools: bash, IPython and the RPC below them",
        shown=[
            Shown("bash.true", "bash builtin"),
            Shown("bash.floor_true", "bash builtin on a bare pty", "floor"),
            Shown("bash.bin_true", "bash, /bin/true"),
            Shown("bash.floor_bin_true", "/bin/true on a bare pty", "floor"),
            Shown("ipython.assign", "IPython cell"),
            Shown("ipython.floor", "IPython's own run_cell in one process", "floor"),
            Shown("ipython.zmq_ipc", "jupyter_client over a Unix socket", "peer"),
            Shown("ipython.zmq_tcp", "jupyter_client over TCP", "peer"),
            Shown("uds.rpc", "call over a Unix socket"),
            Shown("uds.tcp_rpc", "call over TCP loopback"),
            Shown("uds.floor", "question and answer over a bare Unix socket", "floor"),
        ],
        caption=[
            "The paper names three optimisations of its tool backend (a pty instead of tmux, IPython without a "
            "gateway, a Unix socket instead of TCP) and measures the first one only, as an action's mean. Here all "
            "three have a number."
        ],
    )


async def measure_sandboxes(options: Options) -> Finding:
    """Time cold and warm starts, ends, and count the memory of many live sandboxes."""
    return finding_of_report(
        await sandboxes.benchmark(options),
        title="A sandbox, from opening to ready for its first command",
        shown=[
            Shown("cold.bwrap", "bubblewrap, the host's userland, forked"),
            Shown("cold.bwrap_first", "bubblewrap, the host's userland, before there is a fork server"),
            Shown("cold.bwrap_dir", "bubblewrap, a folder as image"),
            Shown("cold.bwrap_layers", "bubblewrap, two layers over it"),
            Shown("floor.bwrap", "bwrap true", "floor"),
            Shown("cold.host", "Apptainer, the host's userland"),
            Shown("cold.dir", "Apptainer, a folder as image"),
            Shown("cold.layers", "Apptainer, two layers over it"),
            Shown("cold.sif", "Apptainer, a .sif file"),
            Shown("floor.apptainer_exec", "apptainer exec true", "floor"),
            Shown("warm", "from the warm pool"),
            Shown("close.bwrap", "closing (bubblewrap)"),
            Shown("close.dir", "closing (Apptainer)"),
        ],
        paper=[PaperValue("the paper's code sleeps after a start", 2000.0)],
        metrics={
            "live.count": "live at once",
            "live.starts_per_s": "starts a second, four at a time",
            "live.mib_each": "MiB of each, its shell and daemon included",
            "live_bwrap.starts_per_s": "starts a second of bubblewrap's, forked",
            "live_bwrap.mib_each": "MiB of each of those",
        },
        caption=[
            "The paper has no figure for this; its published code sleeps for 2 s after each start and then polls "
            "every 2 s."
        ],
    )


async def measure_node(options: Options) -> Finding:
    """Measure what accepting, running and delivering cost a node, and how much memory a rollout takes."""
    return finding_of_report(
        await node.benchmark(options),
        title="The node itself: accepting a job, delivering an outcome",
        shown=[
            Shown("accept", "a job, from submit to its acceptance"),
            Shown("deliver", "an outcome, from its end to the trainer's hands"),
        ],
        metrics={
            "rollouts.concurrent": "rollouts in RUN at the same time",
            "turn.cpu_ms": "CPU of the node a turn, ms",
            "rollouts.kib_each": "KiB of the node for each rollout, beside its tokens",
            "rollouts.rss_mib": "MiB of the node in all, beside tokens",
            "stall.p99_ms": "pass of the node's loop, p99, ms",
            "process_per_job.rollout_mib": "MiB of a process for each job (the reference's way)",
            "process_per_job.memory_over_ours": "that, over ours",
            "process_per_job.cpu_over_ours": "CPU of a process for each job, over ours",
        },
        caption=["The paper has no figure for any of these."],
    )


async def measure_cancellation(options: Options) -> Finding:
    """Time a cancel until nothing of the rollout is left."""
    return finding_of_report(
        await cancellation.benchmark(options),
        title="A cancel, until nothing of the rollout is left",
        shown=[
            Shown("cancel.sampling", "while the engine samples"),
            Shown("cancel.tool", "while a tool works"),
            Shown("cancel.request", "a request that does nothing", "floor"),
        ],
        paper=[PaperValue("the paper's code waits before it kills a container", 2000.0)],
        caption=[
            "The paper has no figure for this. Its published code gives a container 2 s between SIGTERM and SIGKILL, "
            "and answers a cancel before the container is gone; ours answers when nothing is left."
        ],
    )


async def measure_faults(options: Options) -> Finding:
    """Count what a trainer gets of a node that is killed again and again."""
    words = {
        "jobs": "jobs accepted",
        "kills": "kills with -9",
        "lost": "lost",
        "doubled": "doubled",
        "failed": "ended otherwise than completed",
        "again": "ran once more after a kill",
        "wall_s": "seconds in all",
        "down_s": "of these, from a kill to the next start",
    }
    return finding_of_report(
        await faults.benchmark(options),
        title="Jobs through a node that is killed with -9",
        shown=[],
        metrics={
            f"faults.{run}.{field}": f"{run}: {said}"
            for run in ("undisturbed", "killed")
            for field, said in words.items()
        },
        caption=[
            "The paper has no figure for this. In its published code a job of a server that crashes is lost, and its "
            "trainer waits for it."
        ],
    )
