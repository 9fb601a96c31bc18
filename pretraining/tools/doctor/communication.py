"""The variables that NCCL, PyTorch's process groups and gloo read: what each does, and which of them do harm.

    environment, /etc/nccl.conf, ~/.nccl.conf -> `variables_in` -> `check_variables`: a verdict for each that is set

The names of NCCL are those of its documentation ("Environment Variables") and of its sources, version 2.30; PyTorch's
those of ProcessGroupNCCL.hpp and FlightRecorder.hpp, version 2.13. None of these libraries says a word about a name
that it does not know.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pretraining.config.values import did_you_mean
from pretraining.launch.machine import read_text
from pretraining.launch.network import GLOO_INTERFACE, NCCL_INTERFACE
from pretraining.tools.doctor.verdicts import Check, Verdict

CONF_FILES = ("/etc/nccl.conf", "~/.nccl.conf")
CONF_FILE_VARIABLE = "NCCL_CONF_FILE"
PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "TORCH_GLOO_")
OFF = ("", "0")


@dataclass(frozen=True)
class Harm:
    """What a variable does to training.

    Attributes:
        consequence: completes "NAME=VALUE is set: ".
        verdict: on GPUs; where a CPU trains, what only GPUs notice is good.
        values: that do it, in upper case; empty = all but 0 and nothing.
        on_cpus: whether a CPU notices it, too.
    """

    consequence: str
    verdict: Verdict
    advice: str = "unset it"
    values: tuple[str, ...] = ()
    on_cpus: bool = False

    def is_done_by(self, value: str) -> bool:
        """Whether a value does it."""
        return value.upper() in self.values if self.values else value not in OFF


WORKAROUND = "unset it, unless it works around a fault of this machine"
HARMS = {
    "CUDA_LAUNCH_BLOCKING": Harm("each kernel is waited for", "bad"),
    "TORCH_NCCL_BLOCKING_WAIT": Harm("each collective is waited for", "bad"),
    "NCCL_BLOCKING_WAIT": Harm("each collective is waited for", "bad"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Harm("each allocation goes to the driver", "bad"),
    "TORCH_DISTRIBUTED_DEBUG": Harm(
        "each collective is checked by another one", "bad", values=("DETAIL",), on_cpus=True
    ),
    "NCCL_P2P_DISABLE": Harm("GPUs of a machine talk through its memory", "look at", WORKAROUND),
    "NCCL_SHM_DISABLE": Harm("processes of a machine talk through the network", "look at", WORKAROUND),
    "NCCL_IB_DISABLE": Harm("machines talk through plain sockets", "look at", WORKAROUND),
    "NCCL_NVLS_ENABLE": Harm("NVLink switches do not add up", "look at", WORKAROUND, values=("0",)),
    "NCCL_CUMEM_ENABLE": Harm("NVLink between machines and its switches are not used", "look at", WORKAROUND, ("0",)),
    "NCCL_P2P_LEVEL": Harm("GPUs of a machine talk through its memory", "look at", WORKAROUND, values=("LOC",)),
    "NCCL_NET_GDR_LEVEL": Harm("network cards do not reach the memory of GPUs", "look at", WORKAROUND, ("LOC",)),
    "NCCL_ALGO": Harm("one algorithm is taken for messages of all sizes", "look at"),
    "NCCL_PROTO": Harm("one protocol is taken for messages of all sizes", "look at", "unset it: some corrupt data"),
    "NCCL_DEBUG": Harm("every call is logged", "bad", "NCCL_DEBUG=WARN says what goes wrong", ("TRACE",)),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Harm("a lost peer is noticed by nobody", "look at", values=("0",)),
    "TORCH_NCCL_DESYNC_DEBUG": Harm("each collective is recorded, to be reported at a timeout", "look at"),
    "TORCH_NCCL_ENABLE_TIMING": Harm("each collective is timed with two more events", "look at"),
    "TORCH_NCCL_NAN_CHECK": Harm("each message is searched for NaN", "look at"),
    "TORCH_SHOW_CPP_STACKTRACES": Harm("errors bring long stacks along", "look at", on_cpus=True),
}
MORE_HARMS = {
    "NCCL_DEBUG": Harm("each process logs pages at its start", "look at", HARMS["NCCL_DEBUG"].advice, ("INFO",))
}

RENAMED = {
    **{f"NCCL_{name}": f"TORCH_NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG")},
    **{f"NCCL_{name}": f"TORCH_NCCL_{name}" for name in ("ENABLE_TIMING", "USE_TENSOR_REGISTER_ALLOCATOR_HOOK")},
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_CPP_STACK": "TORCH_FR_CPP_STACK",
}
"""Names that are still read, and those that took their place."""

EXPLAINED = {
    "NCCL_SOCKET_IFNAME": "interfaces for sockets, by the beginning of their names",
    "NCCL_SOCKET_FAMILY": "IPv4 or IPv6",
    "NCCL_SOCKET_NTHREADS": "threads of each socket connection",
    "NCCL_NSOCKS_PERTHREAD": "sockets of each of these threads",
    "NCCL_DEBUG": "how much NCCL logs",
    "NCCL_DEBUG_SUBSYS": "what NCCL logs about",
    "NCCL_DEBUG_FILE": "where NCCL logs to",
    "NCCL_IB_HCA": "which InfiniBand adapters are used",
    "NCCL_IB_GID_INDEX": "which address of a RoCE adapter is used",
    "NCCL_IB_TC": "traffic class of InfiniBand",
    "NCCL_IB_SL": "service level of InfiniBand",
    "NCCL_IB_TIMEOUT": "how long InfiniBand waits for an answer",
    "NCCL_IB_RETRY_CNT": "how often InfiniBand sends again",
    "NCCL_IB_QPS_PER_CONNECTION": "queue pairs of each InfiniBand connection",
    "NCCL_IB_DISABLE": "leaves InfiniBand alone",
    "NCCL_NET": "which network module is used",
    "NCCL_NET_PLUGIN": "which network plugin is loaded",
    "NCCL_NET_GDR_LEVEL": "how near network card and GPU must be for direct access",
    "NCCL_CROSS_NIC": "whether a ring may change the network card",
    "NCCL_P2P_DISABLE": "keeps GPUs from direct access to each other",
    "NCCL_P2P_LEVEL": "how near GPUs must be for direct access",
    "NCCL_SHM_DISABLE": "keeps processes from shared memory",
    "NCCL_BUFFSIZE": "bytes of the buffers between GPUs",
    "NCCL_MIN_NCHANNELS": "smallest number of channels, which take compute units",
    "NCCL_MAX_NCHANNELS": "largest number of channels, which take compute units",
    "NCCL_MIN_CTAS": "smallest number of thread blocks, which take compute units",
    "NCCL_MAX_CTAS": "largest number of thread blocks, which take compute units",
    "NCCL_TOPO_FILE": "a description of the machine in place of what is found",
    "NCCL_TOPO_DUMP_FILE": "where the description of the machine is written",
    "NCCL_NVLS_ENABLE": "sums in NVLink switches",
    "NCCL_CUMEM_ENABLE": "how buffers are allocated",
    "NCCL_COLLNET_ENABLE": "sums in the network (SHARP)",
    "NCCL_ALGO": "algorithms that may be taken",
    "NCCL_PROTO": "protocols that may be taken",
    "NCCL_TUNER_PLUGIN": "a plugin that chooses algorithms",
    "NCCL_PROFILER_PLUGIN": "a plugin that records events",
    "NCCL_VERSION": "said by container images; nothing reads it",
    "NCCL_CONF_FILE": "a file with more of these variables",
    "GLOO_SOCKET_IFNAME": "the interface that gloo offers to other processes",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what follows from an error in a collective",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "when a process that hangs in NCCL is ended",
    "TORCH_NCCL_ENABLE_MONITORING": "whether a thread watches NCCL's watchdog",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "writes the last collectives down at a timeout",
    "TORCH_FR_BUFFER_SIZE": "how many of the last collectives are remembered",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "how the memory of messages is kept",
    "TORCH_NCCL_HIGH_PRIORITY": "gives collectives streams of high priority",
    "TORCH_NCCL_CUDA_EVENT_CACHE": "uses events of CUDA again",
}

# Without their prefixes; of those that are explained nothing is repeated.
_NCCL = """
ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS CGA_CLUSTER_SIZE CHECKS_DISABLE CHECK_MODE CHECK_POINTERS CHUNK_SIZE
COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES
CONNECT_ROUND_MAX_PEERS CTA_POLICY CUMEM_HOST_ENABLE DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DISABLE_MEM_MANAGER
DMABUF_ENABLE ELASTIC_BUFFER_REGISTER ENABLE_VERSION_CHECK ENV_PLUGIN GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE
GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE GDR_FLUSH_DISABLE GIN_ENABLE GIN_PLUGIN GIN_TYPE GRAPH_DUMP_FILE GRAPH_FILE
GRAPH_HELPER_DISABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER GRAPH_STREAM_ORDERING GROUP_CUDA_STREAM HOME HOSTID IBVERBS_LIB
IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DATA_DIRECT IB_DEVICE_PCI_ORDER
IB_ECE_ENABLE IB_FIFO_TC IB_MERGE_NICS IB_MERGE_VFS IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC IB_OOO_RQ
IB_PCI_RELAXED_ORDERING IB_PKEY IB_PREPOST_RECEIVE_WORK_REQUESTS IB_RECEIVER_SIDE_MATCHING_SCHEME
IB_RESILIENCY_PORT_FAILOVER IB_RESILIENCY_PORT_RECOVERY IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM
IB_ROUTABLE_FLID_GID_INDEX IB_SPLIT_DATA_ON_QPS IB_SUBNET_AWARE_ROUTING IB_SUBNET_PREFIX_LEN IB_USE_INLINE
IB_WARN_RAIL_LOCAL IGNORE_COLLNET_MISMATCH IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P IGNORE_NET_MISMATCH INCLUDE_DIR
IPC_USE_ABSTRACT_SOCKET L1_SHARED_MEMORY_CARVEOUT LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL
LEGACY_CUDA_REGISTER LIB_DIR LL128_BUFFSIZE LL128_C2C LL128_NTHREADS LL_BUFFSIZE LL_THRESHOLD LOCAL_REGISTER
LSA_TEAM_SIZE MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_NRINGS MIN_P2P_NCHANNELS MNNVL_CLIQUE_ID
MNNVL_CROSS_CLIQUE MNNVL_ENABLE MNNVL_RAIL_PER_HOST MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID MULTI_RANK_GPU_ENABLE
MULTI_SEGMENT_REGISTER NCHANNELS_PER_NET_PEER NETDEVS_POLICY NET_DISABLE_INTRA NET_FORCE_FLUSH NET_FORCE_MERGE
NET_GDR_C2C NET_GDR_READ NET_MERGE_LEVEL NET_MERGE_POLICY NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD NET_SHARED_BUFFERS
NET_SHARED_COMMS NTHREADS NUM_RMA_CTX NVB_DISABLE NVB_PRECONNECT NVLINK_UTIL_CENTRIC_SCHED_ENABLE
NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_NCHANNELS NVTX_DISABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE
P2P_EPOCH_ENABLE P2P_LL_THRESHOLD P2P_MAX_PEERS P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE
P2P_PER_CHANNEL_NET_BW P2P_PXN_LEVEL P2P_READ_ENABLE P2P_SCHEDULE_GROUP_SIZE P2P_USE_CUDA_MEMCPY PAT_ENABLE
PROFILE_EVENT_MASK PROGRESS_APPENDOP_FREQ PROXY_APPEND_BATCH_SIZE PROXY_CPUSET PROXY_DUMP_SIGNAL PXN_C2C PXN_DISABLE
RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR REPORT_CONNECT_PROGRESS RINGS RMA_DISABLE RMA_PLUGIN ROOT ROOT_DIR
RUNTIME_CONNECT SET_CPU_STACK_SIZE SET_STACK_SIZE SET_THREAD_NAME SHADOW_MEMPOOL_MAX_SIZE SHM_LOCALITY
SHM_USE_CUDA_MEMCPY SINGLE_PROC_MEM_REG_ENABLE SINGLE_RING_THRESHOLD SOCKET_INLINE SOCKET_MAGIC SOCKET_MIN_TASKSIZE
SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF SYM_CE_THRESHOLD SYM_CTAS
SYM_GIN_KERNELS_ENABLE SYM_KERNEL SYM_NOWIN_ENABLE SYM_REUSE_SYSMEM_HANDLES SYM_TMA_ENABLE THREAD_THRESHOLDS
TOPO_DUMP_FILE_RANK TREE_THRESHOLD UID_STAGGER_RATE UID_STAGGER_THRESHOLD UNPACK_DOUBLE_NCHANNELS
WARN_ENABLE_DEBUG_INFO WIN_ENABLE WIN_STRIDE WORK_ARGS_BYTES WORK_FIFO_BYTES
"""
_TORCH_NCCL = """
ABORT_IN_DESTROY_PG BCAST_UNIQUEID COORD_CHECK_MILSEC DEBUG_INFO_PIPE_FILE DEBUG_INFO_TEMP_FILE EXTRA_DUMP_ON_EXEC
LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NONBLOCKING_TIMEOUT PROPAGATE_ERROR RANKS_PER_ROOT RETHROW_CUDA_ERRORS
SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING USE_COMM_NONBLOCKING USE_TENSOR_REGISTER_ALLOCATOR_HOOK
WAIT_TIMEOUT_DUMP_MILSEC
"""
_OTHERS = """
TORCH_FR_CPP_STACK TORCH_FR_DUMP_TEMP_FILE TORCH_GLOO_LAZY_INIT GLOO_DEVICE_TRANSPORT GLOO_DISABLE_CONNECTION_RETRIES
GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER GLOO_ENABLE_STORE_V2_API GLOO_LOG_LEVEL
"""
KNOWN = frozenset(
    [
        *(f"NCCL_{name}" for name in _NCCL.split()),
        *(f"TORCH_NCCL_{name}" for name in _TORCH_NCCL.split()),
        *_OTHERS.split(),
        *EXPLAINED,
        *HARMS,
        *RENAMED,
    ]
)


def variables_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what is set of these variables: in the environment, else in NCCL's own files."""
    named = environment.get(CONF_FILE_VARIABLE)
    files = (CONF_FILES[0], named or CONF_FILES[1])
    found: dict[str, str] = {}
    for file in reversed(files):  # NCCL reads the file of the machine last, and keeps what is set
        for line in read_text(Path(file).expanduser()).splitlines():
            name, equals, value = line.partition("=")
            if equals and not name.lstrip().startswith("#"):
                found.setdefault(name.strip(), value.strip())
    found |= environment
    return {name: value for name, value in found.items() if name.startswith(PREFIXES) or name in HARMS}


def check_variables(environment: Mapping[str, str], interfaces: Collection[str], is_on_gpu: bool) -> Iterator[Check]:
    """Yields a verdict for each variable that is set.

    Args:
        interfaces: names of this machine's network interfaces.
        is_on_gpu: whether GPUs train; what only they notice is good on CPUs.
    """
    found = variables_in(environment)
    if not any(name.startswith(PREFIXES) for name in found):
        yield Check("NCCL and gloo", "good", "no variable is set: they choose for themselves")
    for name, value in found.items():
        yield _check(name, value, interfaces, is_on_gpu)


def _check(name: str, value: str, interfaces: Collection[str], is_on_gpu: bool) -> Check:
    given = f"{name}={value}"
    if name not in KNOWN:
        hint = did_you_mean(name.lower(), [known.lower() for known in KNOWN], "{}").upper()
        advice = f"did you mean {hint}?" if hint else "unset it, or look it up in the documentation of your version"
        return Check(name, "look at", f"{given} is set, and nothing of this name is known to be read", advice)
    for harm in filter(None, (HARMS.get(name), MORE_HARMS.get(name))):
        if harm.is_done_by(value):
            verdict = harm.verdict if is_on_gpu or harm.on_cpus else "good"
            shown = f"{name}={value.upper() if harm.values else value} is set"
            if verdict == "good":
                return Check(name, "good", f"{shown}: of GPUs only ({harm.consequence})")
            return Check(name, verdict, f"{shown}: {harm.consequence}", harm.advice)
    if name in (NCCL_INTERFACE, GLOO_INTERFACE):
        found = _check_interfaces(name, value, interfaces)
        is_read = is_on_gpu or name == GLOO_INTERFACE
        return found if is_read else replace(found, verdict="good", advice="")
    if name.startswith("NCCL_") and name.endswith(("_DISABLE", "_ENABLE")) and not value.lstrip("+-").isdigit():
        return Check(name, "look at", f"{given} is set: NCCL passes over what is no number", "write 0 or 1")
    if name in RENAMED:
        return Check(name, "look at", f"{given} is set: an old name", f"write {RENAMED[name]}")
    return Check(name, "good", f"{given}: {EXPLAINED.get(name, 'known')}")


def _check_interfaces(name: str, value: str, interfaces: Collection[str]) -> Check:
    """Looks for the interfaces that a variable names: to NCCL by the beginning of names, to gloo as they are."""
    given, there = f"{name}={value}", ", ".join(sorted(interfaces))
    matched = _matching(value, interfaces) if name == NCCL_INTERFACE else set(interfaces).intersection(value.split(","))
    if not matched:
        return Check(
            name, "bad", f"{given} names no interface of this machine, which has {there}", "name one that is there"
        )
    if matched == {"lo"}:
        return Check(
            name, "look at", f"{given}: only this machine hears what is sent there", "name one that others reach"
        )
    return Check(name, "good", f"{given}: {', '.join(sorted(matched))}")


def _matching(value: str, interfaces: Collection[str]) -> set[str]:
    """Interfaces that a pattern of NCCL means: ^ leaves out, = is the whole name, else the beginning of it counts."""
    excludes = value.startswith("^")
    is_exact = value.lstrip("^").startswith("=")
    words = [word for word in value.lstrip("^").lstrip("=").split(",") if word]
    named = {each for each in interfaces if any(each == word if is_exact else each.startswith(word) for word in words)}
    return set(interfaces) - named if excludes else named
