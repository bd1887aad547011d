package controlplane

import (
	"bytes"
	"crypto/x509"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/secret"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// TestRotationStep_CP15: what is to be done next, from what the secret says, what all of the cluster is known to
// have, and who does not have it.
func TestRotationStep_CP15(t *testing.T) {
	at := time.Now()
	due := func(r rotation) rotation { r.made, r.after = at.Add(-time.Hour), at.Add(-time.Minute); return r }
	list := func(names ...string) []string { return names }
	for name, c := range map[string]struct {
		r      rotation
		want   rotationStep
		reason string
	}{
		"no secret yet":              {rotation{}, rotationRests, controlplanev1.NotRotatingReason},
		"never looked at":            {rotation{owned: true, secret: list("a")}, rotationSettles, controlplanev1.NotRotatingReason},
		"rests":                      {rotation{owned: true, secret: list("a"), everywhere: list("a")}, rotationRests, controlplanev1.NotRotatingReason},
		"due":                        {due(rotation{owned: true, secret: list("a"), everywhere: list("a")}), rotationBegins, controlplanev1.NotRotatingReason},
		"due in the future":          {rotation{owned: true, secret: list("a"), everywhere: list("a"), made: at, after: at.Add(time.Hour)}, rotationRests, controlplanev1.NotRotatingReason},
		"made since":                 {rotation{owned: true, secret: list("b"), everywhere: list("b"), made: at, after: at.Add(-time.Minute)}, rotationRests, controlplanev1.NotRotatingReason},
		"due and never looked at":    {due(rotation{owned: true, secret: list("a")}), rotationSettles, controlplanev1.NotRotatingReason},
		"due, the user's":            {due(rotation{secret: list("a"), everywhere: list("a")}), rotationRests, controlplanev1.AuthorityNotOwnedReason},
		"trusting, lacking":          {due(rotation{owned: true, next: true, secret: list("a", "b"), everywhere: list("a"), lacking: list("x")}), rotationRests, controlplanev1.TrustingNewReason},
		"trusting, all there":        {due(rotation{owned: true, next: true, secret: list("a", "b"), everywhere: list("a")}), rotationSettles, controlplanev1.TrustingNewReason},
		"trusted":                    {due(rotation{owned: true, next: true, secret: list("a", "b"), everywhere: list("a", "b")}), rotationSigns, controlplanev1.TrustingNewReason},
		"signing, lacking":           {rotation{owned: true, secret: list("b", "a"), everywhere: list("a", "b"), lacking: list("x")}, rotationRests, controlplanev1.SigningNewReason},
		"signing, all there":         {rotation{owned: true, secret: list("b", "a"), everywhere: list("a", "b")}, rotationSettles, controlplanev1.SigningNewReason},
		"signed":                     {rotation{owned: true, secret: list("b", "a"), everywhere: list("b", "a")}, rotationDrops, controlplanev1.SigningNewReason},
		"dropping, lacking":          {rotation{owned: true, secret: list("b"), everywhere: list("b", "a"), lacking: list("x")}, rotationRests, controlplanev1.DroppingOldReason},
		"dropping, all there":        {rotation{owned: true, secret: list("b"), everywhere: list("b", "a")}, rotationSettles, controlplanev1.DroppingOldReason},
		"the wish changes meanwhile": {due(rotation{owned: true, secret: list("b"), everywhere: list("b", "a"), lacking: list("x")}), rotationRests, controlplanev1.DroppingOldReason},
		"what is known was lost":     {rotation{owned: true, next: true, secret: list("a", "b"), lacking: list("x")}, rotationRests, controlplanev1.TrustingNewReason},
		"a user's chain":             {rotation{secret: list("a", "root")}, rotationSettles, controlplanev1.NotRotatingReason},
		"a user's chain, known":      {rotation{secret: list("a", "root"), everywhere: list("a", "root")}, rotationRests, controlplanev1.NotRotatingReason},
		"a user's, trusting":         {rotation{secret: list("a", "b"), everywhere: list("a"), lacking: list("x")}, rotationRests, controlplanev1.TrustingNewReason},
		"a user's, signing":          {rotation{secret: list("b", "a"), everywhere: list("a", "b")}, rotationSettles, controlplanev1.SigningNewReason},
		"a user's, dropping":         {rotation{secret: list("b"), everywhere: list("b", "a")}, rotationSettles, controlplanev1.DroppingOldReason},
	} {
		t.Run(name, func(t *testing.T) {
			if got := c.r.step(at); got != c.want {
				t.Errorf("step %q, want %q", got, c.want)
			}
			rotating, reason, message := c.r.describe(at)
			if reason != c.reason || rotating != slices.Contains([]string{controlplanev1.TrustingNewReason, controlplanev1.SigningNewReason, controlplanev1.DroppingOldReason}, c.reason) {
				t.Errorf("%v, %s: %s", rotating, reason, message)
			}
			if len(c.r.lacking) > 0 && !strings.Contains(message, "* x") {
				t.Errorf("does not say who lacks: %s", message)
			}
		})
	}
}

// TestRotationEnds: from every state in between, the steps lead to one new authority, and no further.
func TestRotationEnds(t *testing.T) {
	at := time.Now()
	r := rotation{owned: true, secret: []string{"a"}, made: at.Add(-time.Hour), after: at.Add(-time.Minute)}
	var steps []rotationStep
	for range 20 {
		step := r.step(at)
		if step == rotationRests {
			break
		}
		steps = append(steps, step)
		switch step {
		case rotationSettles:
			r.everywhere = r.secret
		case rotationBegins:
			r.secret, r.next = []string{"a", "b"}, true
		case rotationSigns:
			r.secret, r.next, r.made = []string{"b", "a"}, false, at
		case rotationDrops:
			r.secret = []string{"b"}
		}
		if why := unsafeAuthorities("demo-ca", r.everywhere, r.secret); why != "" {
			t.Errorf("after %v: %s", steps, why)
		}
	}
	want := []rotationStep{rotationSettles, rotationBegins, rotationSettles, rotationSigns, rotationSettles, rotationDrops, rotationSettles}
	if !slices.Equal(steps, want) || !slices.Equal(r.everywhere, []string{"b"}) {
		t.Errorf("%v, and in the end %v", steps, r.everywhere)
	}
}

// TestUnsafeAuthorities: what a user puts into the secret must not cut anything off.
func TestUnsafeAuthorities(t *testing.T) {
	for name, c := range map[string]struct {
		everywhere, secret []string
		want               string
	}{
		"unknown":                {nil, []string{"a"}, ""},
		"unchanged":              {[]string{"a"}, []string{"a"}, ""},
		"another one":            {[]string{"a"}, []string{"b"}, "put it behind"},
		"signs before its time":  {[]string{"a"}, []string{"b", "a"}, "put it behind"},
		"back to the first":      {[]string{"b", "a"}, []string{"a"}, "lacks the certificate authority that signs now (b)"},
		"the first step":         {[]string{"a"}, []string{"a", "b"}, ""},
		"the second step":        {[]string{"a", "b"}, []string{"b", "a"}, ""},
		"the second step undone": {[]string{"b", "a"}, []string{"a", "b"}, ""},
		"the third step":         {[]string{"b", "a"}, []string{"b"}, ""},
		"too early":              {[]string{"a", "b"}, []string{"b"}, "lacks the certificate authority that signs now (a)"},
		"the first step undone":  {[]string{"a", "b"}, []string{"a"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := unsafeAuthorities("demo-ca", c.everywhere, c.secret); c.want == "" != (got == "") || !strings.Contains(got, c.want) {
				t.Errorf("got %q", got)
			}
		})
	}
}

// TestLackingNodes: every Node has to say that its machine has what the secret says.
func TestLackingNodes(t *testing.T) {
	got := lackingNodes([]string{"b", "a"}, []holder{
		{name: "there", trusted: []string{"b", "a"}, signer: "b"},
		{name: "foreign"},
		{name: "former", trusted: []string{"a", "b"}, signer: "a"},
		{name: "signed", trusted: []string{"b", "a"}, signer: "a"},
	})
	want := []string{"foreign does not tell", "former trusts what it did", "signed: its kubelet's"}
	if len(got) != len(want) {
		t.Fatalf("%v", got)
	}
	for i := range want {
		if !strings.Contains(got[i], want[i]) {
			t.Errorf("%q, want %q", got[i], want[i])
		}
	}
}

// TestOtherAuthorities: a control plane Machine is replaced for other authorities, and never because a new
// version of Capstan does not know which it has.
func TestOtherAuthorities(t *testing.T) {
	rests := rotation{owned: true, secret: []string{"a"}, everywhere: []string{"a"}}
	begun := rotation{owned: true, secret: []string{"a", "b"}, everywhere: []string{"a"}}
	for name, c := range map[string]struct {
		r    rotation
		made bool
		has  []string
		want bool
	}{
		"the same":                       {rests, true, []string{"a"}, false},
		"made by a former version":       {rests, true, nil, false},
		"never looked at":                {rotation{owned: true, secret: []string{"a"}}, true, nil, false},
		"a user's chain, former":         {rotation{secret: []string{"a", "root"}}, true, nil, false},
		"other ones":                     {begun, true, []string{"a"}, true},
		"former version, and it rotates": {begun, true, nil, true},
		"no data yet":                    {begun, false, nil, false},
		"there":                          {begun, true, []string{"a", "b"}, false},
		"made with those of before":      {rests, true, []string{"a", "z"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := c.r.otherAuthorities(c.made, c.has); (got != "") != c.want {
				t.Errorf("got %q", got)
			}
		})
	}
}

// TestAuthoritySecret: what the steps write. Who only trusts the old authority can verify what the new one
// signs, with the certificate that the old one has signed last.
func TestAuthoritySecret(t *testing.T) {
	old, err := newAuthority(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	data := map[string][]byte{secret.TLSCrtDataName: old.Cert, secret.TLSKeyDataName: old.Key}
	if err := beginRotation(data); err != nil {
		t.Fatal(err)
	}
	next := data[nextCertName]
	if !bytes.Equal(data[secret.TLSKeyDataName], old.Key) || !sameCerts(t, data[secret.TLSCrtDataName], old.Cert, next) {
		t.Error("the new one signs at once, or is not trusted")
	}
	if err := signWithNext(data); err != nil {
		t.Fatal(err)
	}
	if !sameCerts(t, data[secret.TLSCrtDataName], next, old.Cert) || len(data[nextKeyName])+len(data[nextCertName]) > 0 || bytes.Equal(data[secret.TLSKeyDataName], old.Key) {
		t.Error("the new one does not sign, or the old one is not trusted any more, or its key is still there")
	}
	pair := &certs.KeyPair{Cert: data[secret.TLSCrtDataName], Key: data[secret.TLSKeyDataName]}
	leafPEM, _ := leafOf(t, pair)
	verify := func(roots []byte, cross []byte) error {
		leaf, err := certs.DecodeCertPEM(leafPEM)
		if err != nil {
			t.Fatal(err)
		}
		options := x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}
		options.Roots.AppendCertsFromPEM(roots)
		options.Intermediates.AppendCertsFromPEM(cross)
		_, err = leaf.Verify(options)
		return err
	}
	if err := verify(old.Cert, data[bootstrap.CrossCADataName]); err != nil {
		t.Errorf("who trusts the old one: %v", err)
	}
	if verify(old.Cert, nil) == nil {
		t.Error("the old one has signed it")
	}
	if err := dropOld(data); err != nil {
		t.Fatal(err)
	}
	if !sameCerts(t, data[secret.TLSCrtDataName], next) {
		t.Error("the old one is still trusted")
	}
	for _, cross := range [][]byte{nil, data[bootstrap.CrossCADataName]} {
		if err := verify(data[secret.TLSCrtDataName], cross); err != nil {
			t.Errorf("who trusts the new one: %v", err)
		}
	}
}

// TestAuthorityOfClusterAPI: one that must not sign another one is rotated without that.
func TestAuthorityOfClusterAPI(t *testing.T) {
	old := newCA(t)
	data := map[string][]byte{secret.TLSCrtDataName: old.Cert, secret.TLSKeyDataName: old.Key, bootstrap.CrossCADataName: []byte("former")}
	if err := beginRotation(data); err != nil {
		t.Fatal(err)
	}
	if err := signWithNext(data); err != nil {
		t.Fatal(err)
	}
	if data[bootstrap.CrossCADataName] != nil {
		t.Error("nobody who only trusts the old one accepts this")
	}
}

func sameCerts(t *testing.T, bundle []byte, want ...[]byte) bool {
	t.Helper()
	has, err := nodeconfig.Fingerprints(bundle)
	if err != nil {
		t.Fatal(err)
	}
	wanted, err := nodeconfig.Fingerprints(bytes.Join(want, nil))
	if err != nil {
		t.Fatal(err)
	}
	return slices.Equal(has, wanted)
}
