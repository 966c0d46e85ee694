"""What the compiler makes of kernel.cu, which says how to make it anew."""

FUNCTION = "kvd_move"
COMPILER = "13.0"  # nvcc's release
SOURCE_SHA256 = "5790818fb55db4468e680dd3a3591f98a0929a2aad1eaeb0722df45ab9d30560"
TEXT = """\
.version 6.4
.target sm_70
.address_size 64
.visible .entry kvd_move(
    .param .u64 kvd_move_param_0,
    .param .u32 kvd_move_param_1
)
{
    .reg .pred  %p<12>;
    .reg .b16   %rs<3>;
    .reg .b32   %r<52>;
    .reg .b64   %rd<65>;
    ld.param.u64    %rd30, [kvd_move_param_0];
    ld.param.u32    %r5, [kvd_move_param_1];
    mov.u32     %r51, %ctaid.x;
    setp.ge.u32     %p1, %r51, %r5;
    @%p1 bra    $L__BB0_15;
    mov.u32     %r6, %tid.x;
    cvt.u64.u32     %rd1, %r6;
    mov.u32     %r7, %ntid.x;
    mul.lo.s32  %r8, %r7, 3;
    cvt.u64.u32     %rd2, %r8;
    add.s64     %rd3, %rd1, %rd2;
    cvt.u64.u32     %rd4, %r7;
    mov.u32     %r2, %nctaid.x;
    shl.b32     %r9, %r7, 1;
    cvt.u64.u32     %rd5, %r9;
    shl.b32     %r10, %r7, 2;
    cvt.u64.u32     %rd6, %r10;
    cvta.to.global.u64  %rd7, %rd30;
    shl.b64     %rd44, %rd5, 4;
$L__BB0_2:
    mul.wide.u32    %rd32, %r51, 24;
    add.s64     %rd33, %rd7, %rd32;
    ld.global.u64   %rd8, [%rd33+8];
    mov.u64     %rd63, 0;
    neg.s64     %rd34, %rd8;
    and.b64     %rd35, %rd34, 15;
    ld.global.u64   %rd9, [%rd33+16];
    min.u64     %rd10, %rd35, %rd9;
    ld.global.u64   %rd11, [%rd33];
    xor.b64     %rd36, %rd8, %rd11;
    and.b64     %rd37, %rd36, 15;
    setp.ne.s64     %p2, %rd37, 0;
    @%p2 bra    $L__BB0_12;
    setp.le.u64     %p3, %rd10, %rd1;
    @%p3 bra    $L__BB0_6;
    mov.u64     %rd58, %rd1;
$L__BB0_5:
    add.s64     %rd38, %rd11, %rd58;
    ld.u8   %rs1, [%rd38];
    add.s64     %rd39, %rd8, %rd58;
    st.u8   [%rd39], %rs1;
    add.s64     %rd58, %rd58, %rd4;
    setp.lt.u64     %p4, %rd58, %rd10;
    @%p4 bra    $L__BB0_5;
$L__BB0_6:
    add.s64     %rd14, %rd11, %rd10;
    add.s64     %rd15, %rd8, %rd10;
    sub.s64     %rd16, %rd9, %rd10;
    shr.u64     %rd17, %rd16, 4;
    setp.ge.u64     %p5, %rd3, %rd17;
    mov.u64     %rd61, %rd1;
    @%p5 bra    $L__BB0_9;
    mov.u64     %rd59, %rd3;
    mov.u64     %rd61, %rd1;
$L__BB0_8:
    shl.b64     %rd40, %rd61, 4;
    add.s64     %rd41, %rd14, %rd40;
    shl.b64     %rd42, %rd4, 4;
    add.s64     %rd43, %rd41, %rd42;
    ld.v4.u32   {%r11, %r12, %r13, %r14}, [%rd43];
    add.s64     %rd45, %rd41, %rd44;
    ld.v4.u32   {%r19, %r20, %r21, %r22}, [%rd45];
    shl.b64     %rd46, %rd59, 4;
    add.s64     %rd47, %rd14, %rd46;
    ld.v4.u32   {%r27, %r28, %r29, %r30}, [%rd47];
    add.s64     %rd48, %rd15, %rd40;
    ld.v4.u32   {%r35, %r36, %r37, %r38}, [%rd41];
    st.v4.u32   [%rd48], {%r35, %r36, %r37, %r38};
    add.s64     %rd49, %rd48, %rd42;
    st.v4.u32   [%rd49], {%r11, %r12, %r13, %r14};
    add.s64     %rd50, %rd48, %rd44;
    st.v4.u32   [%rd50], {%r19, %r20, %r21, %r22};
    add.s64     %rd51, %rd15, %rd46;
    st.v4.u32   [%rd51], {%r27, %r28, %r29, %r30};
    add.s64     %rd61, %rd61, %rd6;
    add.s64     %rd59, %rd61, %rd2;
    setp.lt.u64     %p6, %rd59, %rd17;
    @%p6 bra    $L__BB0_8;
$L__BB0_9:
    setp.ge.u64     %p7, %rd61, %rd17;
    @%p7 bra    $L__BB0_11;
$L__BB0_10:
    shl.b64     %rd52, %rd61, 4;
    add.s64     %rd53, %rd15, %rd52;
    add.s64     %rd54, %rd14, %rd52;
    ld.v4.u32   {%r43, %r44, %r45, %r46}, [%rd54];
    st.v4.u32   [%rd53], {%r43, %r44, %r45, %r46};
    add.s64     %rd61, %rd61, %rd4;
    setp.lt.u64     %p8, %rd61, %rd17;
    @%p8 bra    $L__BB0_10;
$L__BB0_11:
    and.b64     %rd55, %rd16, -16;
    or.b64      %rd63, %rd55, %rd10;
$L__BB0_12:
    add.s64     %rd64, %rd63, %rd1;
    setp.ge.u64     %p9, %rd64, %rd9;
    @%p9 bra    $L__BB0_14;
$L__BB0_13:
    add.s64     %rd56, %rd11, %rd64;
    ld.u8   %rs2, [%rd56];
    add.s64     %rd57, %rd8, %rd64;
    st.u8   [%rd57], %rs2;
    add.s64     %rd64, %rd64, %rd4;
    setp.lt.u64     %p10, %rd64, %rd9;
    @%p10 bra   $L__BB0_13;
$L__BB0_14:
    add.s32     %r51, %r51, %r2;
    setp.lt.u32     %p11, %r51, %r5;
    @%p11 bra   $L__BB0_2;
$L__BB0_15:
    ret;
}
"""
