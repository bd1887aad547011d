package joining

import (
	"encoding/base64"
	"net/netip"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func bearer(claims string) string {
	return "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln"
}

// A token survives the way through a command line. An error contains no part of it.
func TestToken(t *testing.T) {
	want := Token{Bearer: bearer(`{"jti":"id-1","exp":1900000000}`)}
	got, err := ParseToken(" " + want.String() + "\n")
	if err != nil || got.Bearer != want.Bearer {
		t.Fatalf("%+v, %v", got, err)
	}
	if c, err := got.Claims(); err != nil || c.ID != "id-1" || c.Expiry != 1900000000 {
		t.Errorf("%+v, %v", c, err)
	}
	for name, text := range map[string]string{
		"empty":         "",
		"another text":  "abcdef.0123456789abcdef",
		"cut off":       want.String()[:40],
		"no token":      Token{Bearer: "x"}.String(),
		"no id":         Token{Bearer: bearer(`{}`)}.String(),
		"bad authority": Token{Bearer: want.Bearer, CA: []byte("secret-ca")}.String(),
		"too long":      prefix + strings.Repeat("A", maxBytes+1),
	} {
		_, err := ParseToken(text)
		if err == nil || len(text) > 20 && strings.Contains(err.Error(), text[10:20]) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTermsCheck(t *testing.T) {
	now := time.Now()
	good := func(change func(*Terms)) Terms {
		terms := Terms{Expires: metav1.NewTime(now.Add(time.Hour)), Hosts: 1, Validity: metav1.Duration{Duration: time.Hour}}
		change(&terms)
		return terms
	}
	for want, change := range map[string]func(*Terms){
		"":                  func(*Terms) {},
		"--ttl":             func(s *Terms) { s.Expires = metav1.NewTime(now.Add(25 * time.Hour)) },
		"--ttl from":        func(s *Terms) { s.Expires = metav1.NewTime(now) },
		"--hosts from":      func(s *Terms) { s.Hosts = 0 },
		"--hosts 1 with":    func(s *Terms) { s.Hosts, s.HostName = 2, "a" },
		"--valid-for":       func(s *Terms) { s.Validity.Duration = time.Minute },
		"--failure-domain":  func(s *Terms) { s.FailureDomain = strings.Repeat("a", 257) },
		"lower case":        func(s *Terms) { s.HostName = "A_B" },
		"--label":           func(s *Terms) { s.Labels = map[string]string{"a b": "c"} },
		"--allow-namespace": func(s *Terms) { s.AllowedNamespaces = []string{"A"} },
	} {
		err := good(change).Check(now)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
}

func TestRequest(t *testing.T) {
	for address, valid := range map[string]bool{
		"10.0.0.5:7443": true, "[fd00::5]:7443": true, "host.example:7443": true,
		"": false, "10.0.0.5": false, ":7443": false, "10.0.0.5:0": false, "10.0.0.5:70000": false, "10.0.0.5:http": false,
		"127.0.0.1:7443": false, "[::1]:7443": false, "localhost:7443": false, "0.0.0.0:7443": false, "169.254.1.1:7443": false,
		"[fe80::1%eth0]:7443": false, "224.0.0.1:7443": false, "[::ffff:10.0.0.5]:7443": false, "unix:///run/x:1": false, "a b:1": false,
	} {
		r := Request{Name: "a", Address: address}
		got, err := ParseRequest(r.Encode())
		if (err == nil) != valid || err == nil && got != r {
			t.Errorf("%q: %v", address, err)
		}
	}
	for r, host := range map[Request]string{
		{Name: "a", Dials: true}:                           "a",
		{Name: "a.b", Dials: true}:                         "a.b",
		{Name: "a", Dials: true, Address: "10.0.0.5:7443"}: "",
		{Dials: true}:                                      "",
	} {
		got, err := ParseRequest(r.Encode())
		if name, _ := got.Host(); (err == nil) != (host != "") || err == nil && name != host {
			t.Errorf("%+v: %q, %v", r, name, err)
		}
	}
	for tunnel, valid := range map[string]bool{
		"": true, "10.0.0.5": true, "fd00::5": true, NoTunnel: false, "127.0.0.1": false, "fe80::1": false, "fe80::1%eth0": false,
		"fd00:0::5": false, "::ffff:10.0.0.5": false, "host.example": false, "10.0.0.5/24": false,
	} {
		if err := (Request{Name: "a", Address: "10.0.0.5:7443", TunnelAddress: tunnel}).Check(); (err == nil) != valid {
			t.Errorf("tunnel address %q: %v", tunnel, err)
		}
	}
	for _, text := range []string{"", "{", `{"name":"A","address":"10.0.0.5:1"}`, `{"name":"` + strings.Repeat("a", MaxName+1) + `","address":"10.0.0.5:1"}`, strings.Repeat(" ", maxBytes+1)} {
		if _, err := ParseRequest(text); err == nil {
			t.Errorf("accepted %.40q", text)
		}
	}
}

// The tunnel address defaults to the host's own one towards the management cluster, if other boxes can reach it.
func TestTunnel(t *testing.T) {
	for _, test := range []struct{ set, own, want string }{
		{"", "10.0.0.5", "10.0.0.5"},
		{"", "fd00::5", "fd00::5"},
		{"", "127.0.0.1", ""},
		{"", "fe80::5%eth0", ""},
		{"10.9.0.5", "10.0.0.5", "10.9.0.5"},
		{"10.9.0.5", "127.0.0.1", "10.9.0.5"},
		{NoTunnel, "10.0.0.5", ""},
	} {
		if got := Tunnel(test.set, netip.MustParseAddr(test.own)); got != test.want {
			t.Errorf("--tunnel-address %q of a host with %s: %q, want %q", test.set, test.own, got, test.want)
		}
	}
	if got := Tunnel("", netip.Addr{}); got != "" {
		t.Errorf("without a route: %q", got)
	}
}
