package model

import (
	"slices"
	"strings"
	"testing"
	"time"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
)

// TestRotationStep_CP15: the next step, from the content of the Secret, the authorities that the whole cluster has, and the
// machines that lack them.
func TestRotationStep_CP15(t *testing.T) {
	at := time.Now()
	due := func(r Rotation) Rotation { r.made, r.After = at.Add(-time.Hour), at.Add(-time.Minute); return r }
	list := func(names ...string) []string { return names }
	for name, c := range map[string]struct {
		r      Rotation
		want   RotationStep
		reason string
	}{
		"no secret yet":              {Rotation{}, RotationIdle, controlplanev1.NotRotatingReason},
		"never looked at":            {Rotation{owned: true, Target: list("a")}, RotationRecord, controlplanev1.NotRotatingReason},
		"rests":                      {Rotation{owned: true, Target: list("a"), Established: list("a")}, RotationIdle, controlplanev1.NotRotatingReason},
		"due":                        {due(Rotation{owned: true, Target: list("a"), Established: list("a")}), RotationTrustNew, controlplanev1.NotRotatingReason},
		"due in the future":          {Rotation{owned: true, Target: list("a"), Established: list("a"), made: at, After: at.Add(time.Hour)}, RotationIdle, controlplanev1.NotRotatingReason},
		"made since":                 {Rotation{owned: true, Target: list("b"), Established: list("b"), made: at, After: at.Add(-time.Minute)}, RotationIdle, controlplanev1.NotRotatingReason},
		"due and never looked at":    {due(Rotation{owned: true, Target: list("a")}), RotationRecord, controlplanev1.NotRotatingReason},
		"due, the user's":            {due(Rotation{Target: list("a"), Established: list("a")}), RotationIdle, controlplanev1.AuthorityNotOwnedReason},
		"trusting, lacking":          {due(Rotation{owned: true, next: true, Target: list("a", "b"), Established: list("a"), Pending: list("x")}), RotationIdle, controlplanev1.TrustingNewReason},
		"trusting, all there":        {due(Rotation{owned: true, next: true, Target: list("a", "b"), Established: list("a")}), RotationRecord, controlplanev1.TrustingNewReason},
		"trusted":                    {due(Rotation{owned: true, next: true, Target: list("a", "b"), Established: list("a", "b")}), RotationSignNew, controlplanev1.TrustingNewReason},
		"signing, lacking":           {Rotation{owned: true, Target: list("b", "a"), Established: list("a", "b"), Pending: list("x")}, RotationIdle, controlplanev1.SigningNewReason},
		"signing, all there":         {Rotation{owned: true, Target: list("b", "a"), Established: list("a", "b")}, RotationRecord, controlplanev1.SigningNewReason},
		"signed":                     {Rotation{owned: true, Target: list("b", "a"), Established: list("b", "a")}, RotationDropOld, controlplanev1.SigningNewReason},
		"dropping, lacking":          {Rotation{owned: true, Target: list("b"), Established: list("b", "a"), Pending: list("x")}, RotationIdle, controlplanev1.DroppingOldReason},
		"dropping, all there":        {Rotation{owned: true, Target: list("b"), Established: list("b", "a")}, RotationRecord, controlplanev1.DroppingOldReason},
		"the wish changes meanwhile": {due(Rotation{owned: true, Target: list("b"), Established: list("b", "a"), Pending: list("x")}), RotationIdle, controlplanev1.DroppingOldReason},
		"what is known was lost":     {Rotation{owned: true, next: true, Target: list("a", "b"), Pending: list("x")}, RotationIdle, controlplanev1.TrustingNewReason},
		"a user's chain":             {Rotation{Target: list("a", "root")}, RotationRecord, controlplanev1.NotRotatingReason},
		"a user's chain, known":      {Rotation{Target: list("a", "root"), Established: list("a", "root")}, RotationIdle, controlplanev1.NotRotatingReason},
		"a user's, trusting":         {Rotation{Target: list("a", "b"), Established: list("a"), Pending: list("x")}, RotationIdle, controlplanev1.TrustingNewReason},
		"a user's, signing":          {Rotation{Target: list("b", "a"), Established: list("a", "b")}, RotationRecord, controlplanev1.SigningNewReason},
		"a user's, dropping":         {Rotation{Target: list("b"), Established: list("b", "a")}, RotationRecord, controlplanev1.DroppingOldReason},
	} {
		t.Run(name, func(t *testing.T) {
			if got := c.r.Step(at); got != c.want {
				t.Errorf("step %q, want %q", got, c.want)
			}
			rotating, reason, message := c.r.Describe(at)
			if reason != c.reason || rotating != slices.Contains([]string{controlplanev1.TrustingNewReason, controlplanev1.SigningNewReason, controlplanev1.DroppingOldReason}, c.reason) {
				t.Errorf("%v, %s: %s", rotating, reason, message)
			}
			if len(c.r.Pending) > 0 && !strings.Contains(message, "* x") {
				t.Errorf("the message does not name the lacking machine: %s", message)
			}
		})
	}
}

// TestRotationEnds: from every intermediate state, the steps end with exactly one new authority.
func TestRotationEnds(t *testing.T) {
	at := time.Now()
	r := Rotation{owned: true, Target: []string{"a"}, made: at.Add(-time.Hour), After: at.Add(-time.Minute)}
	var steps []RotationStep
	for range 20 {
		step := r.Step(at)
		if step == RotationIdle {
			break
		}
		steps = append(steps, step)
		switch step {
		case RotationRecord:
			r.Established = r.Target
		case RotationTrustNew:
			r.Target, r.next = []string{"a", "b"}, true
		case RotationSignNew:
			r.Target, r.next, r.made = []string{"b", "a"}, false, at
		case RotationDropOld:
			r.Target = []string{"b"}
		}
		if why := CannotChangeAuthorities("demo-ca", r.Established, r.Target); why != "" {
			t.Errorf("after %v: %s", steps, why)
		}
	}
	want := []RotationStep{RotationRecord, RotationTrustNew, RotationRecord, RotationSignNew, RotationRecord, RotationDropOld, RotationRecord}
	if !slices.Equal(steps, want) || !slices.Equal(r.Established, []string{"b"}) {
		t.Errorf("%v, and in the end %v", steps, r.Established)
	}
}

// TestUnsafeAuthorities: a Secret of a user is refused if machines would lose their connection with it.
func TestUnsafeAuthorities(t *testing.T) {
	for name, c := range map[string]struct {
		everywhere, secret []string
		want               string
	}{
		"unknown":                {nil, []string{"a"}, ""},
		"unchanged":              {[]string{"a"}, []string{"a"}, ""},
		"another one":            {[]string{"a"}, []string{"b"}, "put it behind"},
		"signs before its time":  {[]string{"a"}, []string{"b", "a"}, "put it behind"},
		"back to the first":      {[]string{"b", "a"}, []string{"a"}, "lacks the current signing authority (b)"},
		"the first step":         {[]string{"a"}, []string{"a", "b"}, ""},
		"the second step":        {[]string{"a", "b"}, []string{"b", "a"}, ""},
		"the second step undone": {[]string{"b", "a"}, []string{"a", "b"}, ""},
		"the third step":         {[]string{"b", "a"}, []string{"b"}, ""},
		"too early":              {[]string{"a", "b"}, []string{"b"}, "lacks the current signing authority (a)"},
		"the first step undone":  {[]string{"a", "b"}, []string{"a"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := CannotChangeAuthorities("demo-ca", c.everywhere, c.secret); c.want == "" != (got == "") || !strings.Contains(got, c.want) {
				t.Errorf("got %q", got)
			}
		})
	}
}

// TestLackingNodes: every Node must have the annotation that its machine has the authorities of the Secret.
func TestLackingNodes(t *testing.T) {
	got := PendingNodes([]string{"b", "a"}, []TrustHolder{
		{Name: "there", Trusted: []string{"b", "a"}, Signer: "b"},
		{Name: "foreign"},
		{Name: "former", Trusted: []string{"a", "b"}, Signer: "a"},
		{Name: "signed", Trusted: []string{"b", "a"}, Signer: "a"},
	})
	want := []string{"foreign does not report", "former trusts the former authorities", "kubelet certificates of Node signed"}
	if len(got) != len(want) {
		t.Fatalf("%v", got)
	}
	for i := range want {
		if !strings.Contains(got[i], want[i]) {
			t.Errorf("%q, want %q", got[i], want[i])
		}
	}
}

// TestOtherAuthorities: a control plane Machine with other authorities is replaced. A Machine without a record of its authorities is
// not, because former versions of Capstan wrote none.
func TestOtherAuthorities(t *testing.T) {
	rests := Rotation{owned: true, Target: []string{"a"}, Established: []string{"a"}}
	begun := Rotation{owned: true, Target: []string{"a", "b"}, Established: []string{"a"}}
	for name, c := range map[string]struct {
		r    Rotation
		made bool
		has  []string
		want bool
	}{
		"the same":                       {rests, true, []string{"a"}, false},
		"made by a former version":       {rests, true, nil, false},
		"never looked at":                {Rotation{owned: true, Target: []string{"a"}}, true, nil, false},
		"a user's chain, former":         {Rotation{Target: []string{"a", "root"}}, true, nil, false},
		"other ones":                     {begun, true, []string{"a"}, true},
		"former version, and it rotates": {begun, true, nil, true},
		"no data yet":                    {begun, false, nil, false},
		"there":                          {begun, true, []string{"a", "b"}, false},
		"made with those of before":      {rests, true, []string{"a", "z"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := c.r.OtherAuthorities(c.made, c.has); (got != nil) != c.want {
				t.Errorf("got %v", got)
			}
		})
	}
}

// TestOtherEtcdCertificates: a control plane Machine with other certificates of an external etcd is replaced, unless they are not known.
func TestOtherEtcdCertificates(t *testing.T) {
	for _, c := range []struct {
		has, target string
		newer, want bool
	}{
		{"a,b", "a,c", false, true}, {"a,b", "a,b", false, false}, {"", "a,b", false, false}, {"a,b", "", false, false},
		{"b,a,c", "a,b,c", false, false}, {"a,b", "a,b,c", false, true}, {"", "a,b", true, true}, {"", "", true, false},
	} {
		if got := OtherEtcdCertificates(c.has, c.target, c.newer); (got != nil) != c.want {
			t.Errorf("%q, %q, %v: %v", c.has, c.target, c.newer, got)
		}
	}
}
