// Pictures of messages: reading files, and lists from which pictures can be removed.

import { element, plainButton } from "./dom.js";

const TYPES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]); // the server's
const MOST_SIDE = 2048; // pixels; vision models see fewer
const MOST_BYTES = 2 ** 20;
const QUALITY = 0.9;

// A file as { name, data }, the latter in Base64. Each turn of a chat sends its pictures again, so large ones,
// and those of types that the server does not know, become JPEG files of at most MOST_SIDE pixels.
export async function readPicture(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  const fits = scale === 1 && file.size <= MOST_BYTES && TYPES.has(file.type);
  const data = await base64(fits ? file : await smaller(bitmap, scale));
  bitmap.close();
  return { name: file.name || "image", data };
}

function smaller(bitmap, scale) {
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(scale * side)));
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // JPEG has no transparency
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
}

function base64(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

export function pictureNode(image) {
  const node = element("img", "", "picture");
  node.src = `data:image/*;base64,${image.data}`;
  node.alt = image.name;
  return node;
}

// Pictures in a list element, each with a button that removes it. `field`: gets the focus then.
export class PictureList {
  images = [];

  constructor(node, field) {
    this.node = node;
    this.field = field;
  }

  show(images) {
    this.images = images;
    this.node.replaceChildren(...images.map((image) => this.#item(image)));
  }

  #item(image) {
    const remove = plainButton("✕", () => {
      this.show(this.images.filter((other) => other !== image));
      this.field.focus();
    });
    remove.setAttribute("aria-label", `Remove ${image.name}`);
    const item = element("li");
    item.append(pictureNode(image), remove);
    return item;
  }
}
