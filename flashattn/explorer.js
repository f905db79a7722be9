// Brings one explorer to life: shows its controls, and on input unpacks its frames and swaps the one on view.
// Every figure carries this script; the first one on a page defines the function, the others use it.
window.flashattnExplorer = window.flashattnExplorer || function (id) {
  const figure = document.getElementById(id);
  if (!figure || figure.dataset.ready || !window.DecompressionStream) return; // an old browser keeps the first frame
  figure.dataset.ready = "true";
  const controls = [...figure.querySelectorAll("[data-control]")];
  const frame = figure.querySelector("[data-frame]");
  const sentence = figure.querySelector("[aria-live]");
  let unpacking;

  function unpack() {
    const packed = atob(figure.querySelector("[data-packed]").textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
  }

  async function show() {
    for (const control of controls) {
      if (control.type !== "range") continue;
      const text = JSON.parse(control.dataset.values)[control.value];
      control.setAttribute("aria-valuetext", text);
      control.nextElementSibling.textContent = text;
    }
    unpacking = unpacking || unpack();
    const { pieces, frames } = await unpacking;
    let number = 0; // read after the wait: the reader may have moved on
    for (const control of controls) {
      const range = control.type === "range";
      const count = range ? Number(control.max) + 1 : control.length;
      number = number * count + (range ? Number(control.value) : control.selectedIndex);
    }
    if (Number(frame.dataset.frame) === number) return;
    const [text, ...body] = frames[number].map((piece) => pieces[piece]);
    frame.innerHTML = body.join("");
    frame.dataset.frame = number;
    sentence.textContent = text;
  }

  figure.addEventListener("input", show);
  figure.querySelector(".flashattn-controls").hidden = false;
};
