"""Which topic shows each section, equation, table, listing and figure of the five texts, and what differs from the text.

`SHOWN` has an entry for every section, and for equations and others that are shown by something else than their section.
The keys are those of `headwise_textbook.texts`.
"""

from dataclasses import dataclass

from headwise.wording import Bilingual


@dataclass(frozen=True)
class Shown:
    """How a place is shown.

    topic: the topic of the guide. line: part of the line of its output that is this place's result.
    differs: what differs from the text, and why; None if it works as the text says. command: another one than `tour`.
    """

    topic: str
    line: str
    differs: Bilingual | None = None
    command: str = ""


def _differs(topic: str, line: str, en: str, zh: str) -> Shown:
    return Shown(topic, line, Bilingual(en, zh))


Key = tuple[str, ...]  # text, section, and for others than the section itself its kind and number

_CHAPTER: dict[Key, Shown] = {
    ("11",): Shown("why_heads", "L1H1"),
    ("11.1.1",): _differs("why_heads", "L0H0", "“one pattern” is one row of weights per token; that row can be any if d_k ≥ n", "“一种模式”应理解为每个词元只有一行权重；只要 d_k ≥ n，这一行可以任意"),
    ("11.1.2",): _differs("head_kinds", "previous", "positional heads are found; syntax and coreference only where they are measured with annotated text", "能找到位置头；语法头与指代头须用标注文本测量"),
    ("11.1.3",): Shown("why_heads", "L1H6"),
    ("11.2.1",): Shown("splitting", "[4, 16, 4, 128]"),
    ("11.2.1", "figure", "1"): Shown("splitting", "head 2"),
    ("11.2.2",): Shown("splitting", "[4, 4, 16, 128]"),
    ("11.2.3",): Shown("shapes", "split, transpose V"),
    ("11.2.4",): Shown("contraction", "equal to the layer"),
    ("11.2.4", "figure", "1"): Shown("contraction", "equal to the layer"),
    ("11.3.1",): Shown("shapes", "S = Q Kᵀ"),
    ("11.3.1", "equation", "1"): Shown("shapes", "S = Q Kᵀ"),
    ("11.3.1", "equation", "2"): Shown("shapes", "P = softmax"),
    ("11.3.1", "equation", "3"): Shown("shapes", "H = P V"),
    ("11.3.1", "figure", "1"): Shown("shapes", "P = softmax"),
    ("11.3.2",): Shown("shapes", "transpose"),
    ("11.3.3",): Shown("shapes", "H = P V"),
    ("11.4.1",): Shown("merging", "[4, 4, 16, 128]"),
    ("11.4.1", "figure", "1"): Shown("merging", "right:"),
    ("11.4.2",): Shown("output_projection", "A @ W_O"),
    ("11.4.2", "equation", "1"): Shown("output_projection", "A @ W_O"),
    ("11.4.3",): Shown("output_projection", "sum of the parts"),
    ("11.5.1",): Shown("output_projection", "A @ W_O"),
    ("11.5.1", "figure", "1"): Shown("output_projection", "norm of the output"),
    ("11.5.2",): _differs("residual", "with     residual, 24", "the output does not replace the embedding: it is added to it (residual connection)", "输出并不替代词嵌入，而是（经残差连接）加到它上面"),
    ("11.6.1",): Shown("shapes", "Y = A W_O"),
    ("11.6.1", "figure", "1"): Shown("shapes", "Y = A W_O"),
    ("11.6.2",): Shown("contraction", "equal to the layer"),
    ("11.6.2", "listing", "1"): _differs("masks", "largest output", "same result as the listing, except for a query that may attend to nothing: NaN in the listing, zeros here", "与该代码结果相同；只有什么都不能关注的查询不同：代码得到 NaN，这里得到零"),
    ("11.7.1",): Shown("parameters", "4 · 768²"),
    ("11.7.1", "equation", "1"): _differs("parameters", "heads of size 128", "only without biases, without shared keys and values, and with h·d_k = d_model", "仅当无偏置、不共享键值且 h·d_k = d_model 时成立"),
    ("11.7.1", "table", "1"): Shown("parameters", "12 heads"),
    ("11.7.2",): _differs("configurations", "gemma-7b", "64 or 128 in most models; Gemma has 256, and h·d_k = d_model is not required", "多数模型为 64 或 128；Gemma 是 256，且并不要求 h·d_k = d_model"),
    ("11.7.2", "table", "1"): Shown("configurations", "gpt-2-small"),
    ("11.8.1",): Shown("head_kinds", "punctuation"),
    ("11.8.1", "table", "1"): _differs("head_kinds", "previous", "positional and separator heads with a label in our model; no syntax head in a character model of this size", "我们的模型中有可以判定的位置头与分隔头；这么小的字符模型没有语法头"),
    ("11.8.2",): _differs("head_kinds", "local", "the heads of the text are an example; here kinds are measured against baselines, and rhyme is none of them", "书中的头是举例；这里用基线测量，其中没有押韵一类"),
    ("11.8.3",): _differs("pruning", "least important", "some heads can be removed (which ones depends on the text and on what else is removed); that more heads are more robust is not found", "有些头可以剪掉（是哪些取决于文本，也取决于同时剪掉的其他头）；未测得保留更多头更鲁棒"),
    ("11.9.1",): Shown("cost", "    8 "),
    ("11.9.2",): _differs("trade_off", "  8   64", "the training loss is lower, but not that on held-out text; one head of many is far from the whole, unlike a member of an ensemble", "训练损失更低，但未见文本上的损失并不更低；单独一个头远不及整体，不像集成的成员"),
    ("11.9.3",): Shown("trade_off", " 64    8"),
    ("11.10.1",): Shown("shapes", "split Q"),
    ("11.10.1", "table", "1"): Shown("shapes", "A = Concat"),
    ("11.10.2",): Shown("shapes", "Y = A W_O"),
    ("11.10.3",): Shown("why_heads", "L1H6"),
    ("Part 3",): Shown("scores", "q·k/√d_k"),
    ("Part 3", "equation", "1"): Shown("contraction", "equal to the layer"),
    ("Part 3", "equation", "2"): Shown("contraction", "O_i"),
    ("Part 3", "equation", "3"): Shown("scores", "q·k/√d_k"),
    ("Part 3", "table", "1"): Shown("shapes", "Q = X W_Q"),
}  # fmt: skip
_TREATMENT: dict[Key, Shown] = {
    ("5.3",): Shown("why_heads", "L1H1"),
    ("5.3.1",): _differs("why_heads", "L0H0", "exp(QKᵀ) is not a symmetric kernel, so that multiple kernel learning is an analogy only", "exp(QKᵀ) 不是对称核，多核学习只是类比"),
    ("5.3.2",): Shown("contraction", "equal to the layer"),
    ("5.3.2", "equation", "5.3.1"): Shown("output_projection", "sum of the parts"),
    ("5.3.2", "equation", "5.3.2"): Shown("contraction", "O_i"),
    ("5.3.3",): _differs("parameters", "48 heads", "4·d² only if h·d_k = d_model, without biases and without shared keys and values", "仅当 h·d_k = d_model、无偏置且不共享键值时为 4·d²"),
    ("5.3.4",): _differs("splitting", "[4, 4, 16, 128]", "splitting works as described; the stacking in (5.3.3) does not, see there", "切分与书中一致；(5.3.3) 的堆叠方式不成立，见该处"),
    ("5.3.4", "equation", "5.3.3"): _differs("contraction", "stacked in rows", "matrices of the shapes given must stand side by side; stacked in rows the product does not exist", "按给出的形状，各矩阵必须并排放置；按行堆叠时乘积不存在"),
    ("5.3.4", "equation", "5.3.4"): _differs("contraction", "stacked in rows", "holds for [W_1 | … | W_h], the matrices side by side instead of below one another", "对 [W_1 | … | W_h] 成立，即各矩阵左右并排，而不是上下堆叠"),
    ("5.3.5",): Shown("contraction", "equal to the layer"),
    ("5.3.5", "equation", "5.3.5"): _differs("contraction", "Q        ", "the index k is printed as a colon on the left, and n is both a position and the length", "左边的下标 k 印作冒号，n 既作位置又作长度"),
    ("5.3.5", "equation", "5.3.6"): Shown("contraction", "O_i"),
    ("5.3.5", "equation", "5.3.7"): Shown("contraction", "O_concat"),
    ("5.3.5", "equation", "5.3.8"): Shown("contraction", "Y        "),
    ("5.3.6",): _differs("block_diagonal", "multi_head", "the projections are dense: every head reads every channel", "投影是稠密的：每个头读取所有通道"),
    ("5.3.6", "equation", "5.3.9"): _differs("residual", "without  residual, 24", "MultiHead contains W_Q, W_K, W_V and W_O already; read literally, it would project twice", "MultiHead 已包含 W_Q、W_K、W_V、W_O；照字面会投影两次"),
    ("5.3.6", "equation", "5.3.10"): _differs("block_diagonal", "block_diagonal", "this is another layer, with d²/h parameters in each projection", "这是另一种层，每个投影有 d²/h 个参数"),
    ("5.3.7",): _differs("subspaces", "layer 1", "at equal width F_h does not contain F_1: four heads of size 1 do not replace one of size 4", "d_model 相同时，F_h 并不包含 F_1：四个 1 维的头不能代替一个 4 维的头"),
    ("5.3.8",): _differs("mixtures", "token 0", "the work of standard attention is in proportion to the number of heads with a fixed d_k only; with d_k = d_model / h it does not depend on it", "标准注意力的计算量只在 d_k 固定时与头数成正比；d_k = d_model / h 时与头数无关"),
    ("5.3.9",): _differs("head_kinds", "previous", "identical heads are not separated by the noise of minibatches, only by different starts or dropout", "完全相同的头不会被小批量噪声分开，只有起点不同或用 dropout 才会"),
    ("5.3.9", "equation", "5.3.11"): _differs("information", "heads  ", "low cosines do not mean different information: heads have bases of their own; CKA is larger", "余弦低不代表信息不同：各头的基不同；CKA 更大"),
    ("5.3.10",): _differs("trade_off", " 16   32", "a weight matrix has n(n − 1) degrees of freedom, not n; generalisation by more heads is not found", "权重矩阵有 n(n − 1) 个自由度而不是 n 个；未发现头多带来的泛化提升"),
    ("5.3.11",): _differs("cost", "   64 ", "FLOPs do not depend on h, as stated; but stored scores are h times those of a single head, and the two terms are equal at n = 2·d", "矩阵乘法的计算量确实与 h 无关；但存储的分数是单头的 h 倍，两项到 n = 2·d 才相等"),
    ("5.3.12",): Shown("hardware", "in blocks"),
    ("5.3.13",): _differs("mixtures", "sparse_mixture", "O(k) with one choice for the whole input; if each token chooses, keys and values are needed for every head that any token chose", "整个输入只选一次时为 O(k)；若逐词元选择，任何词元选过的头都需要键和值"),
    ("5.3.13", "equation", "5.3.12"): _differs("mixtures", "token 1", "the sum has width d_k; an output matrix for each head is needed to return to d_model", "和是 d_k 维的；要回到 d_model，每个头需要输出矩阵"),
    ("5.3.14",): _differs("mixing", "grouped_mlp", "what is new is the MLP: maps within groups fold into its first layer", "新增的是 MLP：组内映射可并入它的第一层"),
    ("5.3.14", "equation", "5.3.13"): _differs("mixing", "adds nothing", "the maps within groups fold into the first layer of the MLP: parameters, but no power", "组内映射可并入 MLP 的第一层：增加参数，不增加表达能力"),
    ("5.3.14", "equation", "5.3.14"): _differs("mixing", "head_mixing", "the axis is not given; read as attention over the heads of each token", "未说明沿哪个轴；理解为每个词元的各头之间的注意力"),
    ("5.3.15",): _differs("kv_sharing", "GQA", "LLaMA-2 uses GQA in the 70B model only; g here counts KV heads", "LLaMA-2 只有 70B 使用 GQA；这里 g 表示键值头数"),
    ("5.3.15", "equation", "5.3.15"): _differs("kv_sharing", "MQA", "the concatenation and W_O are left out", "省略了拼接与 W_O"),
    ("5.3.16",): _differs("basis_functions", " 8 heads", "universal approximation fails for a single token, where the layer is linear", "只有一个词元时层是线性的，万能逼近不成立"),
    ("5.3.16", "equation", "5.3.16"): Shown("basis_functions", "16 heads"),
    ("5.3.17",): _differs("information", "head of size 2", "d_k bounds the rank of the scores, not bits: a head of size 2 tells 4,096 keys apart", "d_k 限制的是分数的秩，不是信息的位数：2 维的头能区分 4,096 个键"),
    ("5.3.18",): Shown("convolution", "16.0"),
    ("5.3.19",): _differs("cost", "   64 ", "the strengthening is not free: the exponentials and stored scores grow with h", "增强并非“免费”：指数运算与存储的分数随 h 增长"),
}  # fmt: skip
_TUTORIAL: dict[Key, Shown] = {
    ("1",): _differs("why_heads", "L0H0", "“one pattern” is one row of weights per token; that row can be any if d_k ≥ n", "“一种模式”应理解为每个词元只有一行权重；只要 d_k ≥ n，这一行可以任意"),
    ("2",): _differs("shapes", "Y = A W_O", "the steps are right with a transpose before the product and one after it, as in the complete code of part 4", "在乘积之前与之后各加一次转置（如第 4 部分的完整代码），这些步骤才正确"),
    ("2", "listing", "1"): _differs("shapes", "split Q", "W_Q * X must be X W_Q; [batch, seq, h, d_k] still has to be transposed", "W_Q * X 应为 X W_Q；[batch, seq, h, d_k] 之后还须转置"),
    ("2", "listing", "2"): _differs("shapes", "S = Q Kᵀ", "without the transpose the scores are [2, 10, 8, 8]: heads attend to heads", "没有转置时分数是 [2, 10, 8, 8]：变成头关注头"),
    ("2", "listing", "3"): _differs("merging", "wrong:", "reshape without the transpose mixes tokens", "不转置直接 reshape 会把不同词元混在一起"),
    ("3",): _differs("head_kinds", "previous", "which head does what is measured, not assigned", "哪个头做什么要靠测量，不能指定"),
    ("4",): Shown("contraction", "equal to the layer"),
    ("4", "listing", "1"): Shown("contraction", "equal to the layer"),
    ("5",): _differs("cost", "    8 ", "splitting does not lower the cost: O(n²·d_k) is one of h heads", "拆分不降低计算量：O(n²·d_k) 只是 h 个头中的一个"),
    ("6",): _differs("parameters", " 1 heads", "equal parameters at equal width", "d_model 相同时参数量相同"),
    ("6", "table", "1"): _differs("parameters", " 1 heads", "row 2 (more parameters) does not hold at equal width", "第 2 行（多头参数较多）在 d_model 相同时不成立"),
    ("7",): _differs("scores", "1024  q·k ", "h must divide num_hiddens only where d_k is computed as num_hiddens / h", "只有 d_k 由 num_hiddens / h 算出时，h 才必须整除 num_hiddens"),
}  # fmt: skip
_NOTES: dict[Key, Shown] = {
    ("1",): Shown("trade_off", "  8   64"),
    ("2",): Shown("contraction", "Q        "),
    ("2", "equation", "1"): Shown("contraction", "Q        "),
    ("2", "figure", "1"): Shown("splitting", "head 2"),
    ("3",): _differs("shapes", "P = softmax", "that each head looks at something else follows from training, not from its narrow subspace", "各头关注不同内容是训练的结果，并非因为子空间窄"),
    ("3", "equation", "1"): Shown("shapes", "P = softmax"),
    ("4",): Shown("shapes", "H = P V"),
    ("4", "equation", "1"): Shown("shapes", "H = P V"),
    ("4", "figure", "1"): Shown("shapes", "H = P V"),
    ("5",): Shown("merging", "[4, 4, 16, 128]"),
    ("5", "equation", "1"): _differs("merging", "right:", "what is called MultiHead here is the concatenation before W_O", "这里称为 MultiHead 的是 W_O 之前的拼接"),
    ("6",): Shown("output_projection", "A @ W_O"),
    ("6", "equation", "1"): Shown("output_projection", "sum of the parts"),
}  # fmt: skip
_MAPS = Shown(
    "demonstration", "after dropout",
    Bilingual(
        "one map for each sentence and head; the tutorial draws weights after dropout in training mode, with padding attended to",
        "每句每头一张图；教程画的是训练模式下经过 dropout、并关注填充的权重",
    ),
    "headwise reconstruct FILE --length 137 --out DIR --png DIR",
)  # fmt: skip
_DEMONSTRATION: dict[Key, Shown] = {
    ("00",): Shown("demonstration", "loss, faithful"),
    ("01",): Shown("scores", "q·k/√d_k"),
    ("02",): _differs("why_heads", "L1H1", "the output is a sum over heads; that other heads stand in for one, as in an ensemble, is not found", "输出是各头之和；未发现其他头能像集成那样补上某个头"),
    ("03",): _differs("demonstration", "mass on padding", "the maps show a reconstruction of embeddings, not grammar; 天子 and 鳳閣 do not stand out", "这些图显示的是词嵌入的重建，不是语法；“天子”“鳳閣”并不突出"),
    ("03", "listing", "1"): _differs("demonstration", "loss, faithful", "works after mending rotatinotallow and fnotallow, which are damaged option names, the missing quotation mark of the third passage and the lost indentation", "需先修正 rotatinotallow、fnotallow 这两个损坏的参数名，补上第三段缺少的引号和丢失的缩进"),
    **{("03", "figure", str(i)): _MAPS for i in range(1, 13)},
    ("04",): _differs("writing", "武松", "heads that look at rhythm or keywords are not found; a trained model that writes is the next step", "未发现关注节奏或关键字的头；下一步是会写作的模型"),
}  # fmt: skip

SHOWN: dict[Key, Shown] = {
    (text, *key): shown
    for text, part in {
        "chapter": _CHAPTER, "tutorial": _TUTORIAL, "notes": _NOTES, "treatment": _TREATMENT,
        "demonstration": _DEMONSTRATION,
    }.items()
    for key, shown in part.items()
}  # fmt: skip
