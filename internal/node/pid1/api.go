package pid1

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/blockvolume"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/localvolume"
)

func (m *manager) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", m.getStatus)
	mux.HandleFunc("POST /v1/reload", func(w http.ResponseWriter, _ *http.Request) { answer(w, m.reload()) })
	mux.HandleFunc("POST "+machineapi.StopPodsPath, m.postStopPods)
	mux.HandleFunc("POST "+machineapi.StalledPath, m.postStalled)
	VolumeRoutes(mux)
	BlockVolumeRoutes(mux, m.blocks)
	actions := map[string]func(string) error{
		"start": m.supervisor.Start, "stop": m.supervisor.Stop,
		"restart": m.supervisor.Restart, "reload": m.supervisor.Reload,
	}
	for name, do := range actions {
		mux.HandleFunc("POST /v1/services/{service}/"+name, func(w http.ResponseWriter, r *http.Request) {
			answer(w, do(r.PathValue("service")))
		})
	}
	return mux
}

func answer(w http.ResponseWriter, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}
}

// postStopPods answers when the pods have stopped. They stop even if the client does not wait.
func (m *manager) postStopPods(w http.ResponseWriter, r *http.Request) {
	text := r.URL.Query().Get(machineapi.StopPodsWithin)
	limit, err := time.ParseDuration(text)
	if err != nil || limit < 0 || limit > machineapi.MaxStopPods {
		http.Error(w, fmt.Sprintf("%s is %q, expected a duration of at most %s", machineapi.StopPodsWithin, text, machineapi.MaxStopPods), http.StatusBadRequest)
		return
	}
	m.stopPods(limit)
}

// VolumeRoutes serves the limits of local volumes to the node agent, which lacks the capability.
func VolumeRoutes(mux *http.ServeMux) {
	mux.HandleFunc("POST /v1/volumes/{volume}/limit", postLimit)
	mux.HandleFunc("POST /v1/volumes/{volume}/unlimit", func(w http.ResponseWriter, r *http.Request) {
		answer(w, localvolume.OfMachine.Unlimit(r.PathValue("volume")))
	})
}

func postLimit(w http.ResponseWriter, r *http.Request) {
	if size, ok := sizeOf(w, r); ok {
		answer(w, localvolume.OfMachine.Limit(r.PathValue("volume"), size))
	}
}

// sizeOf returns the size in a request. Without one, it answers with an error.
func sizeOf(w http.ResponseWriter, r *http.Request) (size int64, ok bool) {
	size, err := strconv.ParseInt(r.URL.Query().Get("bytes"), 10, 64)
	if err != nil {
		http.Error(w, fmt.Sprintf("bytes is %q, expected a number", r.URL.Query().Get("bytes")), http.StatusBadRequest)
		return 0, false
	}
	return size, true
}

// BlockVolumeRoutes serves the devices of block volumes to the node agent, and to the kubelet by the program losetup.
func BlockVolumeRoutes(mux *http.ServeMux, devices *blockvolume.Devices) {
	mux.HandleFunc("POST /v1/block-volumes/{volume}/provide", func(w http.ResponseWriter, r *http.Request) {
		if size, ok := sizeOf(w, r); ok {
			answer(w, devices.Provide(r.PathValue("volume"), size))
		}
	})
	mux.HandleFunc("POST /v1/block-volumes/{volume}/withdraw", func(w http.ResponseWriter, r *http.Request) {
		answer(w, devices.Withdraw(r.PathValue("volume")))
	})
	mux.HandleFunc("POST /v1/held-devices/hold", func(w http.ResponseWriter, r *http.Request) {
		answer(w, devices.Hold(r.URL.Query().Get("path")))
	})
	mux.HandleFunc("POST /v1/held-devices/release", func(w http.ResponseWriter, r *http.Request) {
		answer(w, devices.Release(r.URL.Query().Get("path")))
	})
}

// maxReason bounds the reason of a stalled bootstrap in bytes.
const maxReason = 4096

// postStalled stores the reason in the body. A longer one is cut.
func (m *manager) postStalled(w http.ResponseWriter, r *http.Request) {
	reason, err := io.ReadAll(io.LimitReader(r.Body, maxReason))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	m.setStalled(strings.ToValidUTF8(string(reason), ""))
}

// getStatus answers with the status once, or with ?watch=true at each change until the client disconnects.
func (m *manager) getStatus(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	watch := r.URL.Query().Get("watch") == "true"
	for {
		status, wait := m.status(r.Context())
		if err := encoder.Encode(status); err != nil || !watch {
			return
		}
		if err := http.NewResponseController(w).Flush(); err != nil {
			return
		}
		if !wait() {
			return
		}
	}
}

// status returns the current status, and a function that returns true at the next change and false when ctx has ended.
func (m *manager) status(ctx context.Context) (initapi.Status, func() bool) {
	m.mu.Lock()
	status, changed := m.bootstrap, m.changed
	m.mu.Unlock()
	services, servicesChanged := m.supervisor.Services()
	status.Services = services
	return status, func() bool {
		select {
		case <-changed:
		case <-servicesChanged:
		case <-ctx.Done():
			return false
		}
		return true
	}
}
