// A safe subset of Markdown: text becomes a tree of plain objects, and elements are made of that. Text of a model is only
// ever put into text nodes; there is no HTML in it and no address but http and https.

const MAX_DEPTH = 8;
const MAX_LENGTH = 40000; // longer text is shown as it is

export function parseMarkdown(text, depth = 0) {
  if (depth > MAX_DEPTH || text.length > MAX_LENGTH) return [{ tag: "p", children: [text] }];
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const nodes = [];
  let i = 0;
  const take = (test) => {
    const taken = [];
    while (i < lines.length && test(lines[i])) taken.push(lines[i++]);
    return taken;
  };
  while (i < lines.length) {
    const line = lines[i];
    const fence = /^ {0,3}(```+|~~~+)\s*([\w+-]*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (fence) {
      i++;
      const code = take((each) => !each.trimStart().startsWith(fence[1]));
      i++; // the closing fence, if it has come
      nodes.push({ tag: "pre", children: [{ tag: "code", children: [code.join("\n")] }] });
    } else if (heading) {
      i++;
      nodes.push({ tag: `h${Math.min(6, heading[1].length + 2)}`, children: inline(heading[2]) });
    } else if (/^\s*([-*+]|\d+[.)])\s+/.test(line)) {
      const isNumbered = /^\s*\d/.test(line);
      const items = [];
      for (const each of take((next) => /^\s*([-*+]|\d+[.)])\s+/.test(next) || /^\s+\S/.test(next))) {
        const item = /^\s*([-*+]|\d+[.)])\s+(.*)$/.exec(each);
        if (item) items.push(item[2]);
        else items[items.length - 1] += ` ${each.trim()}`;
      }
      nodes.push({ tag: isNumbered ? "ol" : "ul", children: items.map((item) => ({ tag: "li", children: inline(item) })) });
    } else if (/^>\s?/.test(line)) {
      const quoted = take((each) => /^>\s?/.test(each)).map((each) => each.replace(/^>\s?/, ""));
      nodes.push({ tag: "blockquote", children: parseMarkdown(quoted.join("\n"), depth + 1) });
    } else if (!line.trim()) i++;
    else {
      const isText = (each) => each.trim() && !/^(#{1,6}\s|>|\s*([-*+]|\d+[.)])\s| {0,3}(```|~~~))/.test(each);
      const paragraph = [lines[i++], ...take(isText)];
      nodes.push({ tag: "p", children: inline(paragraph.join("\n")) });
    }
  }
  return nodes;
}

const MARKS = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([\s\S]+?)\*\*|__([\s\S]+?)__|\*([^\s*][\s\S]*?)\*|\[([^\]\n]+)\]\(([^)\s]+)\)/;

function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const nodes = [];
  let rest = text;
  for (let found; (found = MARKS.exec(rest)); rest = rest.slice(found.index + found[0].length)) {
    if (found.index) nodes.push(rest.slice(0, found.index));
    const [all, , code, strong, strong2, emphasis, label, address] = found;
    if (code !== undefined) nodes.push({ tag: "code", children: [code] });
    else if (strong || strong2) nodes.push({ tag: "strong", children: inline(strong || strong2, depth + 1) });
    else if (emphasis) nodes.push({ tag: "em", children: inline(emphasis, depth + 1) });
    else if (/^https?:\/\//i.test(address)) nodes.push({ tag: "a", href: address, children: [label] });
    else nodes.push(all);
  }
  if (rest) nodes.push(rest);
  return nodes;
}

export function renderMarkdown(nodes) {
  const made = document.createDocumentFragment();
  for (const node of nodes) {
    if (typeof node === "string") {
      made.append(node);
      continue;
    }
    const element = document.createElement(node.tag);
    if (node.href) {
      element.href = node.href;
      element.rel = "noopener noreferrer nofollow";
      element.target = "_blank";
    }
    element.append(renderMarkdown(node.children));
    made.append(element);
  }
  return made;
}
