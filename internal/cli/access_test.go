package cli

import (
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Logs and shells use the box only if the command line says so, or if nothing names a management cluster.
func TestOnThisBox(t *testing.T) {
	for name, test := range map[string]struct {
		s            surroundings
		socket, here bool
		want         bool
	}{
		"a host":                             {here: true, want: true},
		"a workstation":                      {},
		"--kubeconfig on a host":             {s: surroundings{kubeconfig: "k"}, here: true},
		"--kubeconfig and --root":            {s: surroundings{kubeconfig: "k", root: true}, here: true},
		"--context on a host":                {s: surroundings{context: "c"}, here: true},
		"$KUBECONFIG on a host":              {s: surroundings{environment: "e"}, here: true},
		"--root with $KUBECONFIG":            {s: surroundings{environment: "e", root: true}, want: true},
		"--socket with $KUBECONFIG":          {s: surroundings{environment: "e"}, socket: true, want: true},
		"--socket of a box without capstand": {socket: true, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := onThisBox(test.s, test.socket, test.here); got != test.want {
				t.Errorf("%v, want %v", got, test.want)
			}
		})
	}
}

// A missing machine and a missing API have the exit code of missing objects. The exit code of a command is that of capstan.
func TestAccessErrors(t *testing.T) {
	resource := schema.GroupResource{Group: "machines.capstan.dev", Resource: "capstanmachines"}
	for name, test := range map[string]struct {
		err  error
		code int
	}{
		"no machine": {apierrors.NewNotFound(resource, "m"), exitNotFound},
		"no API":     {apierrors.NewGenericServerResponse(404, "get", schema.GroupResource{}, "", "", 0, true), exitNotFound},
		"no right":   {apierrors.NewForbidden(resource, "m", errors.New("no")), exitFailed},
	} {
		if code := exitCode(accessError(test.err)); code != test.code {
			t.Errorf("%s: exit code %d, want %d", name, code, test.code)
		}
	}
}
