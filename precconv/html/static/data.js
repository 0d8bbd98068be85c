// The data of the page: base64 of deflated JSON, in which the tensors are columns.

async function unpack() {
  const text = atob(document.getElementById("data").textContent.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** A function from a row's number to its value in a column, which may be kept as numbers into a table. */
function reader(column) {
  if (!column) return () => null;
  if (Array.isArray(column)) return (i) => column[i];
  return (i) => (column.at[i] === null ? null : column.table[column.at[i]]);
}

const length = (column) => (Array.isArray(column) ? column : column ? column.at : []).length;
