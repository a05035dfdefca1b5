"""Schedules that the TPU compiler writes down."""

from foveal.schedule import KernelSchedule, dump_flags, kernel_schedules

ANALYSIS = (
    'total scheduled bundles: 9\n 9 scheduled bundles (100%): custom-call(), custom_call_target="tpu_custom_call"\n'
)


def bundles(lines: list[tuple[int, str, str]]) -> str:
    """A listing: depth of loops, instructions, and what region begins or ends."""
    listing = ["LB: loop body", ""]
    for address, (depth, instruction, regions) in enumerate(lines):
        note = f" /* {regions} */" if regions else ""
        label = "LB" if "sphi" in instruction else "  "
        listing.append(f"{address:#6x} {label}: {'> ' * depth}{{ {instruction} }}{note}")
    return "\n".join(listing) + "\n"


def conditional(depth: int, region: int, body: list[str]) -> list[tuple[int, str, str]]:
    """A branch past `body`, with the four bundles after it that are executed in any case."""
    skip = (depth, f"%1 = sbr.rel (%p) target = $region{region}", "")
    lines = [skip, *[(depth, "", "")] * 4, *[(depth, instruction, "") for instruction in body]]
    return [*lines, (depth, "%2 = nop", f"Start/End empty region {region}")]


def write(directory, name: str, text: str, analysis: str = ANALYSIS) -> None:
    (directory / f"17-{name}-00-schedule-analysis_final_bundles.txt").write_text(analysis)
    (directory / f"17-{name}-01-final_bundles.txt").write_text(text)


WORK = ["%v = vmul.f32 %a, %b"]


def test_a_step_and_its_conditional_parts(tmp_path):
    """Those of the kernel, in order; not the grid's transfers, and not what stands before and after the loop."""
    body = [(1, "%i = sphi %0", "")]
    body += conditional(1, 7, [*WORK * 3])
    body += conditional(1, 8, ["%d = dma.hbm_to_vmem %x", *WORK * 9])
    body += conditional(1, 9, [*WORK * 5])
    lines = [(0, "%s = smov.u32 0", ""), *body, (1, "%3 = sbr.rel (!%p) target = $region1", ""), (0, "halt", "")]
    write(tmp_path, "kernel.2", bundles([(0, "%z = smov.u32 1", "Start region 1"), *lines]))
    (kernel,) = kernel_schedules(tmp_path)
    assert kernel == KernelSchedule("kernel.2", len(body) + 1 - 3 - 5, (3, 5), ())


def test_all_of_a_step_may_stand_under_one_condition(tmp_path):
    """Steps before the first and after the last move data only; the kernel's own parts stand within the others."""
    inner = conditional(1, 8, WORK * 20) + conditional(1, 9, WORK * 30)
    (skip, *slots), rest = conditional(1, 7, [])[:-1], conditional(1, 7, [])[-1:]
    body = [(1, "%i = sphi %0", ""), skip, *slots, *inner, *rest]
    write(tmp_path, "kernel", bundles([(0, "", ""), *body, (0, "halt", "")]))
    (kernel,) = kernel_schedules(tmp_path)
    assert kernel.branches == (20, 30)
    assert kernel.step == len(body) - 50


def test_a_comment_may_take_lines(tmp_path):
    """Within a bundle."""
    text = bundles([(1, "%i = sphi %0 /* window: (1, 2)\n0x9 bounds: (8,)\n */", ""), (1, "%n = nop", "")])
    write(tmp_path, "kernel", text)
    assert kernel_schedules(tmp_path)[0].step == 2


def test_loops_within_a_step_are_counted_once_and_told(tmp_path):
    loop = [(2, "%j = sphi %0", ""), (2, "", "")]
    write(tmp_path, "kernel", bundles([(1, "%i = sphi %0", ""), *loop, (1, "", ""), *loop, loop[1], (1, "", "")]))
    (kernel,) = kernel_schedules(tmp_path)
    assert (kernel.step, kernel.loops) == (8, (2, 3))


def test_a_kernel_without_a_grid(tmp_path):
    write(tmp_path, "kernel", bundles([(0, "%v = vmul.f32 %a, %b", "")] * 6))
    assert kernel_schedules(tmp_path)[0].step == 6


def test_only_kernels(tmp_path):
    """Not XLA's own operations, nor the program around them."""
    assert kernel_schedules(tmp_path) == []
    write(tmp_path, "fusion.3", bundles([(0, "", "")]), "9 scheduled bundles: fusion(%a)\n")
    write(tmp_path, "TLP", bundles([(0, "", "")]))
    assert kernel_schedules(tmp_path) == []


def test_the_flags_name_the_directory():
    assert "--xla_jf_dump_to=/tmp/here " in dump_flags("/tmp/here")
