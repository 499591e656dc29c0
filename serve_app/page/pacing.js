// How often something is drawn that changes faster than it can be.

const SHARE = 4; // drawing takes at most one part in so many of the time

// A function that draws with its last arguments: in the next frame, but not before the pause that follows
// a slow one.
export function paced(draw) {
  let wanted = null;
  let waiting = false;

  function next() {
    waiting = wanted !== null;
    if (waiting) requestAnimationFrame(frame);
  }

  function frame() {
    const begun = performance.now();
    const given = wanted;
    wanted = null;
    try {
      draw(...given);
    } finally {
      setTimeout(next, (SHARE - 1) * (performance.now() - begun));
    }
  }

  return (...given) => {
    wanted = given;
    if (!waiting) next();
  };
}
