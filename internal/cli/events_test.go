//go:build linux

package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	. "github.com/onsi/gomega"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/testenv/expect"
)

// testEvents: with --progress json, each line on standard error is an event, also those about blockers and errors.
func (s *site) testEvents() {
	own := s.env.Namespace(s.t)
	kept := clusterNamed(own, "kept")
	kept.Finalizers = []string{"capstan.dev/test"} // its deletion does not complete
	grown := clusterNamed(own, "grown")
	grown.Spec.Topology = clusterv1.Topology{ClassRef: clusterv1.ClusterClassRef{Name: "none"}, Version: "v1.36.3"}
	for _, c := range []*clusterv1.Cluster{kept, grown} {
		s.create(c)
		c.Status.Conditions = []metav1.Condition{{Type: clusterv1.ClusterAvailableCondition, Status: metav1.ConditionFalse, Reason: "NotAvailable", Message: "no machines", LastTransitionTime: metav1.Now()}}
		if err := s.env.Client.Status().Update(s.t.Context(), c); err != nil {
			s.t.Fatal(err)
		}
	}
	l := embedded.Layout{Root: s.t.TempDir()}
	s.installation(s.t, l, `{"hosts":["local"]}`, s.silentKubeconfig(), nil)
	if err := errors.Join(os.MkdirAll(l.HostRoot("local"), 0o711), os.WriteFile(filepath.Join(l.Root, ".capstan"), nil, 0o600)); err != nil {
		s.t.Fatal(err)
	}
	admin := s.kubeconfig("", own)
	of := func(args ...string) []string {
		return append([]string{"--kubeconfig", admin, "--root", s.t.TempDir()}, args...)
	}
	for name, test := range map[string]struct {
		args []string
		code int
		has  []eventState
	}{
		"delete":       {of("delete", "cluster", "kept", "--timeout", "3s"), exitTimeout, []eventState{eventWaiting, eventBlocked, eventFailed}},
		"scale":        {of("scale", "cluster", "grown", "--control-plane-machines", "3", "--timeout", "3s"), exitTimeout, []eventState{eventWaiting, eventBlocked, eventFailed}},
		"missing":      {of("delete", "cluster", "missing"), exitNotFound, []eventState{eventFailed}},
		"invalid flag": {of("scale", "cluster", "grown", "--workers", "many"), exitUsage, []eventState{eventFailed}},
		"down":         {[]string{"down", "--root", l.Root, "--assets", l.Root}, exitFailed, []eventState{eventStarted, eventFailed}}, // there is no capstand
	} {
		s.t.Run(name, func(t *testing.T) {
			// On a busy box, the time can end before the first answer of the API server.
			NewWithT(t).Eventually(func(g Gomega) {
				var out, errOut bytes.Buffer
				code := (&app{out: &out, errOut: &errOut, program: "capstan"}).run(t.Context(), append([]string{"--progress", "json"}, test.args...))
				found := parseEvents(t, errOut.String())
				g.Expect(code).To(Equal(test.code), "%s", errOut.String())
				g.Expect(found).To(ContainElements(test.has))
			}, expect.Patience).Should(Succeed())
		})
	}
}

// parseEvents returns the states of all events. Each line must be one event with a time and a text.
func parseEvents(t *testing.T, text string) (states []eventState) {
	t.Helper()
	for line := range strings.Lines(text) {
		var e event
		decoder := json.NewDecoder(strings.NewReader(line))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&e); err != nil || e.Time.IsZero() || e.Step+e.Message == "" || e.ElapsedSeconds > 3600 {
			t.Errorf("expected an event, found %q: %v", line, err)
		}
		if !slices.Contains(states, e.State) {
			states = append(states, e.State)
		}
	}
	return states
}
