// Search in pages that are opened from the disk: browsers start no workers there, so the script runs in a frame instead.
// The file's name is what the plugin "offline" looks for before it would load one from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.documentElement.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.answer(data)
      inside.importScripts = (...urls) => Promise.all(urls.map(one => this.load(one)))
      this.loaded = this.load(url)
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script")
        Object.assign(script, { src: new URL(url, location.href).href, onload: resolve, onerror: reject })
        this.frame.contentDocument.documentElement.append(script)
      })
    }
    answer(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      this.onmessage?.(event)
    }
    postMessage(data) {
      const inside = this.frame.contentWindow
      this.loaded.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
