// Dialogs and short messages.

import { announce, h } from "./dom.js";

/**
 * Opens a dialog with a form; resolves to its fields when it is sent, to null when it is closed.
 * @param {string} title
 * @param {Node[]} content fields, each with a name and a label
 * @param {{action?: string, danger?: boolean, check?: (fields: Object) => Promise<any>}} options `check` may throw: its
 *   message is shown and the dialog stays open; what it returns is what the dialog resolves to
 */
export function ask(title, content, { action = "OK", danger = false, check } = {}) {
  return new Promise(resolve => {
    const problem = h("p", { class: "problem pad", role: "alert", hidden: true });
    const sends = h("button", { type: "submit", class: danger ? "danger" : "primary" }, action);
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", { id: "dialog-title" }, title),
      content,
      problem,
      h(
        "p",
        { class: "actions" },
        sends,
        h("button", { type: "button", value: "no", onclick: () => dialog.close() }, "Cancel"),
      ),
    );
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    let result = null;
    form.addEventListener("submit", async event => {
      event.preventDefault();
      const fields = Object.fromEntries(new FormData(form));
      sends.disabled = true;
      try {
        result = check ? ((await check(fields)) ?? fields) : fields;
        dialog.close();
      } catch (error) {
        problem.textContent = error.message;
        problem.hidden = false;
        sends.disabled = false;
      }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(result);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Asks whether to do something that cannot be taken back easily; resolves to true or false. */
export const confirm = async (title, text, action, options = {}) =>
  (await ask(title, [h("p", {}, text)], { action, danger: true, ...options })) !== null;

/**
 * Says shortly that something is done.
 * @param {string} text
 * @param {{undo?: () => Promise<any>, problem?: boolean}} options `undo` gets a button that takes it back
 */
export function toast(text, { undo, problem = false } = {}) {
  const place = document.getElementById("toasts");
  const note = h(
    "div",
    { class: `toast ${problem ? "problem" : ""}`, role: problem ? "alert" : "status" },
    h("span", {}, text),
  );
  const gone = () => note.remove();
  if (undo) {
    note.append(
      h(
        "button",
        {
          type: "button",
          onclick: async () => {
            gone();
            try {
              await undo();
              announce("Undone");
            } catch (error) {
              toast(error.message, { problem: true });
            }
          },
        },
        "Undo",
      ),
    );
  }
  note.append(h("button", { type: "button", "aria-label": "Dismiss", onclick: gone }, "×"));
  place.append(note);
  setTimeout(gone, undo || problem ? 15000 : 6000);
}

/** Does something for a button; it is disabled meanwhile, and a failure is shown. */
export async function act(button, work) {
  button.disabled = true;
  try {
    return await work();
  } catch (error) {
    toast(error.message, { problem: true });
    return undefined;
  } finally {
    button.disabled = false;
  }
}
